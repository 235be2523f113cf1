#!/usr/bin/env bash
# The main commands, with the programs of the folder $1. What they print matters only where one fails.
set -euo pipefail
bin=$(cd "$1" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

try() {
    "$bin/fedlesam" "$@" >said 2>&1 || { cat said && echo "fails with the lowest versions: fedlesam $*" && exit 1; }
}

try run --algorithm fedlesam --rounds 2 --model mlp --workers 2 --memory 50kB --store pinned \
    --checkpoint-every 1 --out x
try list algorithms
try compare fedavg fedsam --rounds 2 --model mlp --probe sharpness:every=1,samples=50,steps=2 --out c
try report c --out page --figures figures --tables tables
try probe x --probe hessian:samples=100 --probe surface:points=3,samples=50
try split
try cost
try runs .
echo "the main commands work with the lowest versions"
