// Which kernels this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace penstock {

struct Isa {
  std::string name;
  const Kernels* kernels;
};

const std::vector<Isa>& isas();            // those this CPU has, the fastest first
const Isa& choose(const std::string& name);  // "auto": the fastest

}  // namespace penstock
