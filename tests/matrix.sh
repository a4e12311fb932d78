#!/usr/bin/env bash
# Runs the tests for each Python with the newest packages and with the lowest that pyproject.toml
# allows, and prints a table. Opt-in: it takes an hour or more and several gigabytes.
#
#   tests/matrix.sh [FOLDER]            environments and logs go to FOLDER (default: .venv-matrix)
#   PYTHONS="3.12" PACKAGES=lowest tests/matrix.sh
#   PYTEST="tests/formats -x" tests/matrix.sh
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:-.venv-matrix}")
mkdir -p "$folder"
python3 -m venv "$folder/uv"
"$folder/uv/bin/pip" install --quiet uv
uv=$folder/uv/bin/uv
declare -A resolution=([newest]=highest [lowest]=lowest-direct)
failed=0
table="| Python | packages | numpy | h5py | lmdb | tensorflow | zarr | mypy | tests |
|---|---|---|---|---|---|---|---|---|"
for python in ${PYTHONS:-3.11 3.12 3.13}; do
  for packages in ${PACKAGES:-newest lowest}; do
    env=$folder/$python-$packages
    log=$folder/$python-$packages.log
    here=$(.ci/find-python "$python")
    "$uv" venv --quiet --clear --python "${here:-$python}" "$env"
    "$uv" pip install --quiet --python "$env" --resolution "${resolution[$packages]}" -e '.[dev]'
    types=ok
    if [ "$packages" = newest ]; then # what older packages say of their types is not looked at
      "$env/bin/mypy" --cache-dir "$env/mypy" >"$log" 2>&1 || types=failed
    else
      types=-
      : >"$log"
    fi
    # shellcheck disable=SC2086  # several arguments
    "$env/bin/python" -m pytest -q -p no:cacheprovider ${PYTEST:-} >>"$log" 2>&1 || failed=1
    [ "$types" != failed ] || failed=1
    versions=$("$env/bin/python" -c 'from importlib.metadata import version
print(" | ".join(map(version, ["numpy", "h5py", "lmdb", "tensorflow", "zarr"])))')
    table+="
| $python | $packages | $versions | $types | $(tail -n 1 "$log" | tr -d '=') |"
    echo "${table##*$'\n'}"
  done
done
printf '\n%s\n' "$table"
exit "$failed"
