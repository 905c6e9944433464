/* An NVIDIA driver's management library with two GPUs: what nvidia-ml-py calls, and no more.
 * TEST_GPUS="percent:MiB percent:MiB" is what the two do; "broken" makes the driver refuse to start.
 * The file TEST_GPU_PROCESSES has the number of processes that compute on each: "1 0". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GPUS 2
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define DRIVER_NOT_LOADED 9

struct utilisation { unsigned gpu, memory; };
struct process { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };
struct memory { unsigned long long total, free, used; };

static const char *const names[GPUS] = {"Test GPU A", "Test GPU B"};
static unsigned percent[GPUS];
static unsigned long long mebibytes[GPUS];

static size_t position(const void *handle) { return (size_t)((const char *const *)handle - names); }

int nvmlInitWithFlags(unsigned flags) {
    const char *gpus = getenv("TEST_GPUS");
    (void)flags;
    if (gpus == NULL || strcmp(gpus, "broken") == 0) return DRIVER_NOT_LOADED;
    sscanf(gpus, "%u:%llu %u:%llu", &percent[0], &mebibytes[0], &percent[1], &mebibytes[1]);
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = GPUS;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= GPUS) return NOT_FOUND;
    *handle = (void *)&names[index];
    return 0;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    snprintf(name, size, "%s", names[position(handle)]);
    return 0;
}

int nvmlDeviceGetUtilizationRates(void *handle, struct utilisation *found) {
    /* Above 100: this GPU does not answer. */
    if (percent[position(handle)] > 100) return NOT_FOUND;
    found->gpu = percent[position(handle)];
    found->memory = 0;
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *found) {
    found->total = 16384ULL << 20;
    found->used = mebibytes[position(handle)] << 20;
    found->free = found->total - found->used;
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *found) {
    const char *path = getenv("TEST_GPU_PROCESSES");
    FILE *file = path == NULL ? NULL : fopen(path, "r");
    unsigned counts[GPUS] = {0, 0}, wanted;
    if (file != NULL) {
        if (fscanf(file, "%u %u", &counts[0], &counts[1]) < 1) counts[0] = 0;
        fclose(file);
    }
    wanted = counts[position(handle)];
    if (wanted > *count || (wanted > 0 && found == NULL)) {
        *count = wanted;
        return INSUFFICIENT_SIZE;
    }
    for (*count = 0; *count < wanted; (*count)++) found[*count] = (struct process){1, 1ULL << 20, 0, 0};
    return 0;
}

const char *nvmlErrorString(int code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "Not Found"; }
