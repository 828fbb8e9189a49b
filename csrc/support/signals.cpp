#include "support/signals.h"

#include <utility>

namespace zero3 {
namespace {

std::function<void()> check_signals_function;
thread_local bool is_handling = false;

}  // namespace

void check_signals() {
  if (!check_signals_function) return;
  struct Handling {
    const bool before = std::exchange(is_handling, true);
    ~Handling() { is_handling = before; }
  } handling;
  check_signals_function();
}

void set_check_signals(std::function<void()> function) {
  check_signals_function = std::move(function);
}

bool handles_signals() { return is_handling; }

}  // namespace zero3
