// Refuses impossible requests at once, before anything is computed.
#pragma once

#include <stdexcept>
#include <string>

namespace penstock {

inline void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

}  // namespace penstock
