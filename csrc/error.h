// How errors reach the user: as a Zero3Error where Python has said what that is.
#pragma once

#include <functional>
#include <string>

namespace zero3 {

[[noreturn]] void throw_error(const std::string& message);

// `function` throws; without one, std::runtime_error is thrown.
void set_throw(std::function<void(const std::string& message)> function);

// For long waits: lets Python handle its signals, a keyboard interrupt say, which may throw.
void check_signals();
void set_check_signals(std::function<void()> function);

}  // namespace zero3

// The message is made as TORCH_CHECK makes it.
#define ZERO3_CHECK(condition, ...)                                  \
  do {                                                               \
    if (!(condition)) ::zero3::throw_error(::c10::str(__VA_ARGS__)); \
  } while (false)
