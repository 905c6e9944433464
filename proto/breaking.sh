#!/usr/bin/env bash
# Fails when a change of the protocol is not additive. Compares with the newest release; before the first release, with
# origin/main; on origin/main itself, with the last commit, or with the commit before if proto/ has no uncommitted change.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"

skip() {
    echo "buf breaking: skipped, $1"
    exit 0
}

[[ -e .git ]] || skip "this is not a git checkout"
head=$(git rev-parse --verify --quiet HEAD) || skip "there is no commit yet"

has_protocol() { # commit; false also if a shallow clone lacks the commit
    git rev-parse --verify --quiet "$1^{commit}" >/dev/null && [[ -n $(git ls-tree -r --name-only "$1" -- proto | grep '\.proto$') ]]
}

candidates=()
if tag=$(git describe --tags --abbrev=0 2>/dev/null); then candidates+=("$tag"); fi
if main=$(git rev-parse --verify --quiet origin/main) && [[ $main != "$head" ]]; then candidates+=(origin/main); fi
if [[ -n $(git status --porcelain -- proto) ]]; then candidates+=(HEAD); fi
candidates+=(HEAD~1)

for base in "${candidates[@]}"; do
    if has_protocol "$base"; then
        before=$(mktemp -d)
        trap 'rm -rf "$before"' EXIT
        git archive "$base" proto | tar -x -C "$before"
        echo "buf breaking: comparing with $base"
        buf breaking proto --against "$before/proto" || {
            echo "cannot accept this change of v1: it is incompatible with installed keepers and managers;" \
                "only add fields, messages and values, or start a v2" >&2
            exit 1
        }
        exit
    fi
done
skip "no earlier commit here has the protocol (a first commit, or a shallow clone)"
