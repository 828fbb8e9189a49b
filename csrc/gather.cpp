#include "gather.h"

#include <c10/core/GradMode.h>

#include "collectives.h"

namespace zero3 {
namespace {

std::function<void(const std::string&)> refresh_function;

void check_gatherable(const Parameter& parameter) {
  TORCH_CHECK(!parameter.shard.is_meta(), "zero3: '", parameter.fqn,
              "' is still on the meta device. Materialise the sharded model first: "
              "model.to_empty(device=...), then initialise it or load a checkpoint.");
}

// One collective for parameters of one dtype and process group. The wire is rank-major:
//   [ rank 0: chunk of p0 | chunk of p1 | ... ][ rank 1: chunk of p0 | ... ] ...
std::vector<at::Tensor> gather_together(const std::vector<ParameterPtr>& parameters) {
  const Parameter& first = *parameters.front();
  int64_t numel = 0;  // a rank's
  std::vector<std::string> fqns;
  for (auto& parameter : parameters) {
    check_gatherable(*parameter);
    numel += parameter->chunk_numel();
    fqns.push_back(parameter->fqn);
  }
  auto options = at::TensorOptions(first.compute_dtype).device(first.device);
  auto mine = at::empty({numel}, options);
  int64_t offset = 0;
  for (auto& parameter : parameters) {
    auto owned = parameter->shard_rows() * parameter->row_numel();
    auto chunk = mine.narrow(0, offset, parameter->chunk_numel());
    chunk.narrow(0, 0, owned).view(parameter->shard.sizes()).copy_(parameter->shard);
    chunk.narrow(0, owned, chunk.numel() - owned).zero_();
    offset += parameter->chunk_numel();
  }
  auto all = at::empty({first.world_size * numel}, options);
  start_all_gather(first.group_name, all, mine, fqns)->wait();

  std::vector<at::Tensor> fulls;
  offset = 0;
  for (auto& parameter : parameters) {
    if (parameters.size() == 1 && parameter->is_contiguous()) {
      // The chunks end to end are the full tensor already.
      fulls.push_back(
          all.narrow(0, 0, parameter->rows() * parameter->row_numel()).view(parameter->sizes));
      break;
    }
    auto full = at::empty_strided(parameter->sizes, parameter->strides, options);
    for (int64_t rank = 0; rank < parameter->world_size; ++rank) {
      const int64_t rows = parameter->rows_of(rank);
      if (rows == 0) break;
      full.narrow(0, rank * parameter->chunk_rows(), rows)
          .copy_(all.narrow(0, rank * numel + offset, rows * parameter->row_numel())
                     .view(parameter->sizes_with_rows(rows)));
    }
    fulls.push_back(full);
    offset += parameter->chunk_numel();
  }
  return fulls;
}

}  // namespace

void set_refresh(std::function<void(const std::string& fqn)> function) {
  refresh_function = std::move(function);
}

void refresh(const Parameter& parameter) {
  if (refresh_function) refresh_function(parameter.fqn);
}

std::vector<at::Tensor> gather(const std::vector<ParameterPtr>& parameters) {
  c10::NoGradGuard no_grad;
  std::vector<at::Tensor> fulls(parameters.size());
  for (size_t first = 0; first < parameters.size(); ++first) {
    if (fulls[first].defined()) continue;
    std::vector<ParameterPtr> alike;
    std::vector<size_t> positions;
    for (size_t i = first; i < parameters.size(); ++i) {
      if (parameters[i]->group_name != parameters[first]->group_name ||
          parameters[i]->compute_dtype != parameters[first]->compute_dtype)
        continue;
      alike.push_back(parameters[i]);
      positions.push_back(i);
    }
    auto gathered = gather_together(alike);
    for (size_t i = 0; i < alike.size(); ++i) fulls[positions[i]] = gathered[i];
  }
  return fulls;
}

}  // namespace zero3
