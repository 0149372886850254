# shellcheck shell=bash
# Sourced by scripts that compile with zig's clang, for other systems than this one or for older ones.

zig_program() { # path, Python that has ziglang, words of zig: writes a program that is one of zig's
  # zig knows the instruction sets of ARM by its own names only.
  cat > "$1" <<PROGRAM
#!/usr/bin/env bash
exec "$2" -m ziglang ${*:3} "\${@/#-march=armv8.2-a+dotprod/-mcpu=generic+v8_2a+dotprod}"
PROGRAM
  chmod +x "$1"
}
