/* AMD's management library (SMI) with two GPUs: what amdsmi calls, and no more. TEST_GPUS and TEST_GPU_PROCESSES are as in
 * nvidia_driver.c. Sources: amdsmi.h of ROCm 7.0, and the structures in the package amdsmi 7.0.2. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GPUS 2
#define NOT_SUPPORTED 2
#define NO_DRIVER 34

#include "others.h"

struct engine_usage { uint32_t gfx, umc, mm, reserved[13]; };
/* Only the first field of amdsmi_asic_info_t is filled in. */
struct asic_info { char market_name[256]; };

static const char *const names[GPUS] = {"Test GPU A", "Test GPU B"};
static unsigned percent[GPUS];
static unsigned long long mebibytes[GPUS];

static size_t position(const void *handle) { return (size_t)((const char *const *)handle - names); }

int amdsmi_init(uint64_t flags) {
    const char *gpus = getenv("TEST_GPUS");
    (void)flags;
    if (gpus == NULL || strcmp(gpus, "broken") == 0) return NO_DRIVER;
    sscanf(gpus, "%u:%llu %u:%llu", &percent[0], &mebibytes[0], &percent[1], &mebibytes[1]);
    return 0;
}

/* Each GPU is a socket of its own. */
int amdsmi_get_socket_handles(uint32_t *count, void **handles) {
    for (size_t each = 0; handles != NULL && each < GPUS; each++) handles[each] = (void *)&names[each];
    *count = GPUS;
    return 0;
}

int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **handles) {
    if (handles != NULL) handles[0] = socket;
    *count = 1;
    return 0;
}

int amdsmi_get_gpu_asic_info(void *handle, struct asic_info *found) {
    strcpy(found->market_name, names[position(handle)]);
    return 0;
}

int amdsmi_get_gpu_activity(void *handle, struct engine_usage *found) {
    /* Above 100: this GPU does not answer. */
    if (percent[position(handle)] > 100) return NOT_SUPPORTED;
    found->gfx = percent[position(handle)];
    return 0;
}

int amdsmi_get_gpu_memory_usage(void *handle, int type, uint64_t *used) {
    (void)type;
    *used = mebibytes[position(handle)] << 20;
    return 0;
}

int amdsmi_get_gpu_process_list(void *handle, uint32_t *count, void *found) {
    const char *path = getenv("TEST_GPU_PROCESSES");
    FILE *file = path == NULL ? NULL : fopen(path, "r");
    unsigned counts[GPUS] = {0, 0};
    (void)found; /* zeros: nobody reads the processes themselves */
    if (file != NULL) {
        if (fscanf(file, "%u %u", &counts[0], &counts[1]) < 1) counts[0] = 0;
        fclose(file);
    }
    *count = counts[position(handle)];
    return 0;
}

int amdsmi_status_code_to_string(int code, const char **text) {
    *text = code == NO_DRIVER ? "Driver Not Loaded" : "Not Found";
    return 0;
}
