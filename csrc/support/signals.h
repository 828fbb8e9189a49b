// Signals in long waits.
#pragma once

#include <functional>

namespace zero3 {

// Lets Python handle its signals, such as a keyboard interrupt, in a long wait. May throw.
void check_signals();
void set_check_signals(std::function<void()> function);

// Whether this thread handles signals in a wait of the runtime. Neither a gather nor a reduction
// may begin there: other ranks would not take part.
bool handles_signals();

}  // namespace zero3
