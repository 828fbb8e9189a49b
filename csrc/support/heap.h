// Keeps glibc from returning the end of its heap to the system. In backward, activations lie there:
// each step would free them, and the next would fault them in again page by page. See "glibc's
// malloc" in docs/performance.md.
#pragma once

namespace zero3 {

// Keeps memory below the present end of the heap, and up to 64 MiB above it, from being returned.
// Called where a step uses much memory. Does nothing with another malloc, on a thread that does
// not allocate from this heap, or if the environment has ZERO3_KEEP_HEAP=0.
void keep_heap();

// Lets glibc return free memory again, until the next keep_heap().
void let_go_of_heap();

}  // namespace zero3
