// What a step frees at the end of glibc's heap goes back to the system, and the next step faults it
// in again page by page: in backward, activations lie there. See "glibc's malloc" in
// docs/performance.md.
#pragma once

namespace zero3 {

// Keeps what lies below the present end of the heap, and up to 64 MiB that come to lie above, from
// being given back. Called where a step holds much. Does nothing with another malloc, or on a
// thread whose memory comes from elsewhere.
void keep_heap();

// What is free may be given back again, until the next keep_heap().
void let_go_of_heap();

}  // namespace zero3
