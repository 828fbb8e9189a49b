// Errors raised to the user: a Zero3Error once Python has set that type.
#pragma once

#include <functional>
#include <string>

namespace zero3 {

[[noreturn]] void throw_error(const std::string& message);

// Sets the function that throws. Without one, throw_error() throws std::runtime_error.
void set_throw(std::function<void(const std::string& message)> function);

}  // namespace zero3

// Formats the message as TORCH_CHECK does.
#define ZERO3_CHECK(condition, ...)                                  \
  do {                                                               \
    if (!(condition)) ::zero3::throw_error(::c10::str(__VA_ARGS__)); \
  } while (false)
