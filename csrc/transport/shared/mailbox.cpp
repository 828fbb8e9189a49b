#include "transport/shared/mailbox.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <atomic>
#include <exception>

#include "kernels/sum.h"
#include "support/error.h"
#include "support/memory.h"
#include "transport/shared/shared_memory.h"

namespace zero3 {

namespace {

constexpr int8_t kZero = -1;  // in place of a dtype: the gradient is zero

std::mutex mailboxes_mutex;
std::vector<std::weak_ptr<Mailbox>> mailboxes;  // all of this process
std::atomic<int> alive = 0;                     // number of live mailboxes

}  // namespace

const Block& PendingSum::rows() const { return SharedMemory::of(*parameter).blocks[block]; }

ReduceWords& PendingSum::words() const { return SharedMemory::of(*parameter).reduce_words[block]; }

std::shared_ptr<Mailbox> Mailbox::make(std::shared_ptr<RankWaiter> waiter, at::Tensor memory) {
  std::shared_ptr<Mailbox> mailbox(new Mailbox(std::move(waiter), std::move(memory)));
  std::lock_guard lock(mailboxes_mutex);
  std::erase_if(mailboxes, [](auto& other) { return other.expired(); });
  mailboxes.push_back(mailbox);
  return mailbox;
}

Mailbox::~Mailbox() { --alive; }

void Mailbox::poll_everywhere() {
  poll(/*all=*/true);
  if (alive == 1) return;
  std::unique_lock lock(mailboxes_mutex);
  const auto all = mailboxes;
  lock.unlock();
  for (auto& weak : all) {
    auto mailbox = weak.lock();
    if (!mailbox || mailbox.get() == this) continue;
    try {
      mailbox->poll(/*all=*/true);
    } catch (const std::exception&) {  // what waits there, perhaps on another thread, gets it too
    }
  }
}

Mailbox::Mailbox(std::shared_ptr<RankWaiter> waiter, at::Tensor memory)
    : waiter_(std::move(waiter)),
      memory_(std::move(memory)),
      mine_(memory_[waiter_->rank()].mutable_data_ptr<uint8_t>()),
      capacity_(memory_.size(1)),
      arena_(capacity_) {
  ++alive;
}

at::Tensor Mailbox::empty(at::IntArrayRef sizes, at::ScalarType dtype, const std::string& fqn) {
  const auto options = at::TensorOptions(dtype);
  const int64_t nbytes = c10::multiply_integers(sizes) * options.dtype().itemsize();
  std::optional<uint64_t> offset;
  const auto take = [&] {
    std::lock_guard lock(mutex_);
    offset = arena_.take(nbytes);
    return offset.has_value();
  };
  poll();
  if (!take())
    waiter_->wait([&]() -> std::optional<RankWaiter::Missing> {
      poll_everywhere();
      if (take()) return std::nullopt;
      auto missing = who_keeps_memory();
      ZERO3_CHECK(missing, "the gradient of '", fqn, "' in ", dtype, " takes ", nbytes,
                  " bytes, for which the ", capacity_,
                  " bytes that ranks share have no room: fully_shard(..., transport='c10d') has no "
                  "such bound");
      return missing;
    });
  auto deleter = [memory = memory_, weak = weak_from_this(), offset = *offset](void*) {
    if (auto mailbox = weak.lock()) mailbox->give_back(offset);
  };
  auto tensor =
      at::for_blob(mine_ + *offset, sizes).deleter(deleter).options(options).make_tensor();
  poison(tensor);
  return tensor;
}

bool Mailbox::holds(const at::Tensor& tensor) const {
  const auto* data = static_cast<const uint8_t*>(tensor.const_data_ptr());
  return data >= mine_ && data < mine_ + capacity_;
}

void Mailbox::give_back(uint64_t offset) {
  std::lock_guard lock(mutex_);
  arena_.give_back(offset);
}

PendingSumPtr Mailbox::post(const ParameterPtr& parameter, size_t block, const at::Tensor& grad,
                            uint64_t backward, at::ScalarType wire_dtype, double divisor,
                            const at::Tensor& shard) {
  auto& shared = SharedMemory::of(*parameter);
  auto& words = shared.reduce_words[block];
  waiter_->wait([&]() -> std::optional<RankWaiter::Missing> {
    if (words.readers(words.latest()).empty()) return std::nullopt;
    poll_everywhere();
    return who_keeps(words, words.latest(), parameter->fqn());
  });
  const bool is_empty = !grad.defined() || grad.numel() == 0;  // has no memory
  const auto offset = is_empty ? 0 : static_cast<const uint8_t*>(grad.const_data_ptr()) - mine_;
  const auto dtype = grad.defined() ? static_cast<int8_t>(grad.scalar_type()) : kZero;
  const uint64_t epoch = words.next_epoch(backward);
  words.post(epoch, {static_cast<uint64_t>(offset), dtype, static_cast<int8_t>(wire_dtype)});
  PendingSumPtr pending;
  if (words.is_read_by(waiter_->rank())) {
    const auto& [begin, rows, reader] = shared.blocks[block];
    const int64_t first = parameter->source->layout.first_row_of(waiter_->rank());
    const auto sum = reader ? shard.narrow(0, begin - first, rows) : shard;
    pending =
        std::make_shared<PendingSum>(PendingSum{parameter, block, epoch, wire_dtype, divisor, sum});
  }
  {
    std::lock_guard lock(mutex_);
    if (pending) unsummed_.push_back(pending);
    unread_.push_back({grad, epoch, words, shared.progress(), parameter->fqn()});
  }
  waiter_->notify();
  return pending;
}

void Mailbox::finish(const PendingSumPtr& pending) {
  waiter_->wait([&]() -> std::optional<RankWaiter::Missing> {
    poll_everywhere();
    std::lock_guard lock(mutex_);  // other threads poll too
    if (pending->is_summed) return std::nullopt;
    return {{pending->words().writers(pending->epoch),
             "it has not sent the gradient of '" + pending->parameter->fqn() + "'"}};
  });
}

void Mailbox::drop(const PendingSumPtr& pending) {
  {
    std::lock_guard lock(mutex_);
    if (std::erase(unsummed_, pending) == 0) return;
  }
  pending->words().consume(pending->epoch);
  waiter_->notify();
}

void Mailbox::poll(bool all) {
  std::list<Unread> read;  // destroyed after the lock is released: give_back() takes it
  bool changed = false;
  const auto tell = c10::make_scope_exit([&] {  // also if a later sum is wrong
    if (changed) waiter_->notify();
  });
  {
    std::lock_guard lock(mutex_);
    for (auto it = unsummed_.begin(); it != unsummed_.end();) {
      PendingSum& pending = **it;
      auto& words = pending.words();
      if (words.writers(pending.epoch).empty()) {
        sum(pending);
        pending.is_summed = true;
        words.consume(pending.epoch);
        changed = true;
        it = unsummed_.erase(it);
      } else if (all) {
        check_complete(pending);
        ++it;
      } else {
        break;
      }
    }
    for (auto it = unread_.begin(); it != unread_.end();) {
      const auto next = std::next(it);
      if (it->words.readers(it->epoch).empty())
        read.splice(read.end(), unread_, it);
      else if (!all)
        break;
      it = next;
    }
  }
}

void Mailbox::check_complete(const PendingSum& pending) const {
  const auto& parameter = *pending.parameter;
  const auto ranks_gone = pending.words().ranks_gone(pending.epoch);
  ZERO3_CHECK(
      ranks_gone.empty(), "a backward has ended on ", waiter_->name_of_rank(ranks_gone.front()),
      " without a gradient of '", parameter.fqn(),
      "': it has raised there, that rank does not use the parameter, or its forwards gather "
      "more often than here, as eager ones do beside compiled ones. All ranks must run the "
      "same forwards and backwards");
}

std::optional<at::Tensor> Mailbox::rows_of(int64_t rank, const PendingSum& pending) const {
  const Source& source = *pending.parameter->source;
  const auto [offset, dtype, wire_dtype] = pending.words().of_rank(rank);
  if (dtype == kZero) return std::nullopt;
  const auto wire = static_cast<at::ScalarType>(wire_dtype);
  ZERO3_CHECK(wire == pending.wire_dtype, "ranks disagree on the dtype that the gradient of '",
              source.fqn, "' is reduced in: ", wire, " on ", waiter_->name_of_rank(rank), " and ",
              pending.wire_dtype, " on ", waiter_->name_of_rank(waiter_->rank()),
              ". Give grad_dtype and reduce_dtype the same values on all ranks");
  const auto options = at::TensorOptions(static_cast<at::ScalarType>(dtype));
  const int64_t first = source.layout.first_row_of(waiter_->rank());
  const int64_t skipped = (pending.rows().reader ? 0 : first) * source.row_numel() *
                          static_cast<int64_t>(options.dtype().itemsize());
  auto* box = mine_ + (rank - waiter_->rank()) * capacity_;
  return at::from_blob(box + offset + skipped, pending.sum.sizes(), options);
}

void Mailbox::sum(PendingSum& pending) const {
  std::vector<at::Tensor> addends;
  for (int64_t rank = 0; rank < waiter_->world_size(); ++rank)
    if (auto rows = rows_of(rank, pending)) addends.push_back(std::move(*rows));
  if (addends.empty()) {
    pending.sum.zero_();
    return;
  }
  // Zeros take part, as they do in messages: -0.0 + 0.0 is 0.0, and -0.0 alone is not.
  if (static_cast<int64_t>(addends.size()) < waiter_->world_size())
    addends.push_back(at::zeros_like(addends.front()));
  const auto dtype = addends.front().scalar_type();
  if (std::ranges::any_of(addends, [&](auto& a) { return a.scalar_type() != dtype; }))
    for (auto& addend : addends) addend = addend.to(pending.wire_dtype);
  sum_and_divide(pending.sum, addends, pending.wire_dtype, pending.divisor);
}

// A rank that has sent its gradient may itself wait for ranks that have not.
RankWaiter::Missing Mailbox::who_keeps(const ReduceWords& words, uint64_t epoch,
                                       const std::string& fqn) {
  if (auto writers = words.writers(epoch); !writers.empty())
    return {std::move(writers), "it has not sent the gradient of '" + fqn + "'"};
  return {words.readers(epoch), "it has not read the gradient of '" + fqn + "'"};
}

std::optional<RankWaiter::Missing> Mailbox::who_keeps_memory() {
  std::lock_guard lock(mutex_);
  if (unread_.empty()) return std::nullopt;
  const auto& first = unread_.front();
  auto missing = who_keeps(first.words, first.epoch, first.fqn);
  if (unread_.size() == 1 || waiter_->world_size() == 2) return missing;
  missing.needs_all = false;
  missing.what =
      "it keeps a mailbox full, in which the first is the gradient of '" + first.fqn + "'";
  for (auto& [grad, epoch, words, progress, fqn] : unread_)
    for (int64_t rank : who_keeps(words, epoch, fqn).ranks)
      if (std::ranges::find(missing.ranks, rank) == missing.ranks.end())
        missing.ranks.push_back(rank);
  return missing;
}

}  // namespace zero3
