// What was asked for cannot be: said at once, and before anything is computed.
#pragma once

#include <stdexcept>
#include <string>

namespace penstock {

inline void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

}  // namespace penstock
