// Gathers ahead, from one graph to the next.
//
//   a graph, or a group in eager code   requests g0   waits    requests g1   waits
//   started                                      g0   g1, g2            -    g3
//
// Within a graph, a pass starts each gather ahead of the wait for the one before. Where graphs and
// eager code follow each other, none knows what the next one gathers, but a forward mostly gathers
// what the forward before it did, in the same order, and so does a backward.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "gather/gather.h"

namespace zero3 {

// The order of the gathers of a model's forwards, or of its backwards. All ranks request the same
// gathers in the same order, and so start the same ones ahead, also in vain.
class GatherOrder {
 public:
  // Begins a forward or backward, and ends the previous one if that has not ended.
  void begin();
  void end();
  bool is_running() const { return is_running_; }

  // Notes a request. Returns the gather that was started ahead for it, or null if there is none, if
  // a shard has changed since, or if another gather has taken its place in memory.
  std::unique_ptr<Gather> take(const std::vector<Gatherable>& wanted,
                               const std::vector<const Codec*>& codecs);
  // Starts the next gathers that are foreseen: as many as have `nbytes` together with those under
  // way, or one.
  void start_next(int64_t nbytes);
  // What the latest requested gather holds until it is waited for.
  std::shared_ptr<void> under_way() const;

 private:
  void drop_ahead();

  struct Request {
    std::vector<std::weak_ptr<Parameter>> parameters;
    std::vector<const Codec*> codecs;
    int64_t nbytes;  // of the full tensors

    bool is_for(const std::vector<Gatherable>& wanted,
                const std::vector<const Codec*>& their_codecs) const;
  };

  std::vector<Request> requests_;  // of the last one that ended, or, if is_new_, of this one
  size_t position_ = 0;            // number of requests so far
  bool is_running_ = false;
  bool is_new_ = true;  // whether this one has requested something else than the last one
  std::deque<std::unique_ptr<Gather>> ahead_;  // for the requests from position_ on
  int64_t bytes_ahead_ = 0;
  std::shared_ptr<int64_t> bytes_under_way_ = std::make_shared<int64_t>(0);  // requested
};

// The orders of one model. Used by its running forward or backward alone.
class GatherOrders {
 public:
  void begin_forward() {
    backward_.end();  // if it has raised
    forward_.begin();
  }
  void end_forward() { forward_.end(); }
  void end_backward() { backward_.end(); }

  // Returns the order of what runs now; null in a forward that did not begin here: a graph that is
  // the whole forward.
  GatherOrder* current();

  int64_t bytes_ahead = 64 << 20;  // of full tensors, at most, or those of one request

 private:
  GatherOrder forward_;
  GatherOrder backward_;
  int running_backward_ = -1;
};

// Returns a gather of `wanted`, which has started, perhaps ahead. See Gather::Gather.
std::unique_ptr<Gather> request_gather(std::vector<Gatherable> wanted,
                                       std::vector<const Codec*> codecs = {});

}  // namespace zero3
