#include "transport/channel.h"

#include <ATen/ops/cat.h>

#include <algorithm>

#include "support/memory.h"

namespace zero3 {
namespace {

class ExchangeOfOne : public Exchange {
 public:
  void gather(const std::vector<Piece>& pieces) override {}
  void reduce(const Rows& rows, const std::string& key) override { addends_.push_back(rows); }
  void all_to_all(const Rows& rows, const std::string& key) override { addends_.push_back(rows); }
  void wait() override {}
};

}  // namespace

std::unique_ptr<Exchange> exchange_of_one() { return std::make_unique<ExchangeOfOne>(); }

Channel::Traits Channel::traits_of(const std::string& backend, bool on_cpu, bool carries_data) {
  return {on_cpu && backend == "gloo", backend == "nccl", carries_data,
          on_cpu || backend == "gloo"};
}

std::optional<int64_t> root_of(const Rows& rows) {
  if (rows.size() < 2) return std::nullopt;
  const auto is_full = [](auto& row) { return row.numel() > 0; };
  if (std::ranges::count_if(rows, is_full) != 1) return std::nullopt;
  return std::ranges::find_if(rows, is_full) - rows.begin();
}

at::Tensor one_run(const Rows& rows) {
  const auto& first = rows.front();
  bool adjacent = true;
  for (size_t r = 0; r < rows.size(); ++r)
    adjacent &= rows[r].is_alias_of(first) &&
                rows[r].storage_offset() ==
                    first.storage_offset() + static_cast<int64_t>(r) * first.numel();
  const int64_t numel = static_cast<int64_t>(rows.size()) * first.numel();
  if (adjacent) return first.as_strided({numel}, {1});
  auto run = pooled_empty({numel}, first.options());
  at::cat_out(run, rows);
  return run;
}

}  // namespace zero3
