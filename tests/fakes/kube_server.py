"""The fake cluster as a separate process: `python kube_server.py FOLDER`.

It ends when its standard input ends. It prints `ready` when FOLDER/kubeconfig and FOLDER/storage exist. FOLDER/storage is the
volume of the claim `nni`. At its end, it prints the number of calls by kind as JSON. With `--without-controllers`, no controller
processes jobs.
"""

import json
import sys
from pathlib import Path

from kube_place import our_cluster


def main():
    with our_cluster(Path(sys.argv[1])) as ours:
        if "--without-controllers" in sys.argv:
            ours.double.controllers.stopped.update(ours.double.store.kinds.values())
        print("ready", flush=True)
        sys.stdin.read()
        counted = {f"{verb} {plural}": count for (verb, plural), count in ours.double.api.counted().items()}
    print(json.dumps(counted), flush=True)


if __name__ == "__main__":
    main()
