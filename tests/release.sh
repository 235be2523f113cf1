#!/usr/bin/env bash
# Build wheel and sdist with the programs of the folder $1, and try both away from the repository.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$(cd "$1" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cd "$root"
rm -rf dist
"$bin/python" -m build --outdir dist . >"$folder/said" 2>&1 || { tail -20 "$folder/said" && exit 1; }
"$bin/twine" check --strict dist/*

echo "the wheel: installed away from the repository"
"$bin/python" -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install --quiet --disable-pip-version-check --constraint "$root/constraints.txt")
"${pip[@]}" torch
"${pip[@]}" dist/*.whl
mkdir "$folder/empty"
cd "$folder/empty"
try() {
    "$folder/venv/bin/fedlesam" "$@" >said 2>&1 || { cat said && echo "fails from the wheel: fedlesam $*" && exit 1; }
    if grep --quiet --extended-regexp '(^|[ (])(docs|examples|benchmarks|reproduction|tests)/' said; then
        cat said && echo "names a file that the wheel does not have: fedlesam $*" && exit 1
    fi
}
try demo
try compare fedavg fedsam --rounds 2 --model mlp --out c
try report c --out page.html --figures figures --tables tables
try run --algorithm fedlesam --rounds 2 --model mlp --out x
try probe x --probe hessian:samples=100
try list algorithms
for command in run compare report probe tune split cost runs list watch explain demo; do try "$command" --help; done
for command in check fetch features; do try data "$command" --help; done
for command in check try keys executor; do try deploy "$command" --help; done
try explain fedgloss

echo "the sdist: every file of the repository, and its tests"
cd "$folder"
tar --extract --gzip --file "$root"/dist/*.tar.gz
cd fedlesam-*
if git -C "$root" rev-parse --quiet --verify HEAD >/dev/null 2>&1; then
    git -C "$root" ls-files | while read -r file; do
        cmp --quiet "$root/$file" "$file" || { echo "the sdist has no $file, or another one" && exit 1; }
    done
fi
"$bin/python" -m pytest --quiet -p no:cacheprovider tests/test_house.py tests/test_documents.py tests/rules/test_oracle.py
echo "wheel and sdist are complete"
