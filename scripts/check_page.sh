#!/usr/bin/env bash
# Builds the page from its source and checks that the file which the server sends is exactly that.
set -euo pipefail
cd "$(dirname "$0")/../page"
npm ci
built=../src/penstock/server/page.html
kept=$(mktemp)
trap 'rm -f "$kept"' EXIT
cp "$built" "$kept"
npm run build
if ! cmp "$kept" "$built"; then
  cp "$kept" "$built"
  echo "page.html is not what page/ gives: run \`npm run build\` in page/ and commit what it writes" >&2
  exit 1
fi
