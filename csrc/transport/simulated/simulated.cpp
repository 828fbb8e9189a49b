#include "transport/simulated/simulated.h"

#include "support/memory.h"

namespace zero3 {
namespace {

class SimulatedExchange : public Exchange {
 public:
  explicit SimulatedExchange(const Channel& channel)
      : rank_(channel.rank), by_messages_(channel.traits.is_point_to_point) {}

  void gather(const std::vector<Piece>& pieces) override {
    for (auto& piece : pieces)
      tensors_.insert(tensors_.end(), piece.rows.begin(), piece.rows.end());
  }

  void reduce(const Rows& rows, const std::string& key) override {
    const auto& own = rows[rank_];
    if (by_messages_) {
      all_to_all(rows, key);
      return;
    }
    const auto root = root_of(rows);
    tensors_.push_back(root ? rows[*root] : one_run(rows));
    addends_.push_back({root ? own : pooled_empty(own.sizes(), own.options())});
  }

  void all_to_all(const Rows& rows, const std::string&) override {
    tensors_.insert(tensors_.end(), rows.begin(), rows.end());
    const auto& own = rows[rank_];
    auto& addends = addends_.emplace_back();
    for (auto& row : rows)
      addends.push_back(row.is_same(own) ? own : pooled_empty(own.sizes(), own.options()));
  }

  void wait() override { tensors_.clear(); }

 private:
  const int64_t rank_;
  const bool by_messages_;
  std::vector<at::Tensor> tensors_;  // tensors that would take part
};

}  // namespace

SimulatedChannel::SimulatedChannel(const std::string& name, int64_t rank, int64_t world_size,
                                   const std::string& backend)
    : Channel(name, rank, world_size, traits_of(backend, /*on_cpu=*/true, /*carries_data=*/false)) {
}

std::unique_ptr<Exchange> SimulatedChannel::exchange() const {
  if (world_size == 1) return exchange_of_one();
  return std::make_unique<SimulatedExchange>(*this);
}

}  // namespace zero3
