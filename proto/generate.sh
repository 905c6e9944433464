#!/usr/bin/env bash
# Writes the Python of every .proto here beside its package (proto/trial_keeper/wire/v1 → trial_keeper/wire/v1).
# With --check it writes nothing, and fails when the committed Python differs from the generated code.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# protoc finds its plugins through PATH.
PATH="$PWD/.venv/bin:$PATH"

generate() { # folder
    find proto -name '*.proto' -print0 | sort -z | xargs -0 python -m grpc_tools.protoc -I proto \
        --python_out="$1" --grpc_python_out="$1" --mypy_out=quiet:"$1" --mypy_grpc_out=quiet:"$1"
}

if [[ "${1:-}" != --check ]]; then
    generate .
    exit
fi

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
generate "$fresh"
stale=0
while read -r file; do
    diff -u "$file" "$fresh/$file" || stale=1
done < <({
    (cd "$fresh" && find . -type f)
    # Generated files whose .proto was removed count as stale.
    find ./trial_keeper/wire -name '*_pb2*.py*' -not -path '*/__pycache__/*'
} | sort -u)
if ((stale)); then
    echo "cannot accept trial_keeper/wire: it differs from the code that proto/ generates; run make proto and commit the result" >&2
    exit 1
fi
echo "generated code is up to date"
