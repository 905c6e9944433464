"""A cluster of our own in a process of its own: `python kube_server.py FOLDER`, until its standard input ends.

Once FOLDER/kubeconfig and FOLDER/storage, the volume of its claim `nni`, are there, it prints `ready`; at the end, as JSON, how
often it was asked for what.
"""

import json
import sys
from pathlib import Path

from kube_place import our_cluster


def main():
    with our_cluster(Path(sys.argv[1])) as ours:
        print("ready", flush=True)
        sys.stdin.read()
        counted = {f"{verb} {plural}": count for (verb, plural), count in ours.double.api.counted().items()}
    print(json.dumps(counted), flush=True)


if __name__ == "__main__":
    main()
