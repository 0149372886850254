// The kernels of every instruction set this CPU has, without Python: runs under emulators and sanitizers.
//   test_kernels [instruction set that must be among them]
#include <cstdio>

#include "check.h"

namespace penstock::test {

namespace {

size_t checks, failures;

}  // namespace

void check(bool holds, const std::string& what) {
  ++checks;
  if (holds) return;
  if (++failures <= 20) std::printf("FAILED %s\n", what.c_str());
}

}  // namespace penstock::test

int main(int count, char** arguments) {
  using namespace penstock;
  if (count > 1) choose(arguments[1]);
  test::test_chain_hash();
  test::test_crc32();
  for (const Isa& isa : isas()) {
    const size_t before = test::checks;
    test::test_rows(isa);
    test::test_delta(isa);
    test::test_attention(isa);
    test::test_products(isa);
    test::test_trellis(isa);
    std::printf("%s: %zu checks\n", isa.name.c_str(), test::checks - before);
  }
  std::printf("%zu failed\n", test::failures);
  return test::failures ? 1 : 0;
}
