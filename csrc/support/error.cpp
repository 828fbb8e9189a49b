#include "support/error.h"

#include <stdexcept>

namespace zero3 {
namespace {

std::function<void(const std::string&)> throw_function;

}  // namespace

void throw_error(const std::string& message) {
  const std::string text = "zero3: " + message;
  if (throw_function) throw_function(text);
  throw std::runtime_error(text);
}

void set_throw(std::function<void(const std::string&)> function) {
  throw_function = std::move(function);
}

}  // namespace zero3
