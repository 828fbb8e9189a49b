// Calls of c10d's collectives by the names that they have in each torch.
//
// torch 2.13 renamed these calls; the templates let one source compile against both names.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace zero3 {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// `fulls` has several tensors only if the channel is grouped.
template <typename AnyGroup>
WorkPtr all_gather(AnyGroup& group, std::vector<at::Tensor>& fulls,
                   std::vector<at::Tensor>& shards) {
  if constexpr (requires { group.all_gather_single_coalesced(fulls, shards); })
    return fulls.size() > 1 ? group.all_gather_single_coalesced(fulls, shards)
                            : group.all_gather_single(fulls[0], shards[0]);
  else
    return fulls.size() > 1 ? group.allgather_into_tensor_coalesced(fulls, shards)
                            : group._allgather_base(fulls[0], shards[0]);
}

template <typename AnyGroup>
WorkPtr reduce_scatter(AnyGroup& group, at::Tensor shard, at::Tensor full) {
  if constexpr (requires { group.reduce_scatter_single(shard, full); })
    return group.reduce_scatter_single(shard, full);
  else
    return group._reduce_scatter_base(shard, full);
}

template <typename AnyGroup>
WorkPtr all_to_all(AnyGroup& group, at::Tensor& received, at::Tensor& sent,
                   std::vector<int64_t>& received_sizes, std::vector<int64_t>& sent_sizes) {
  if constexpr (requires { group.all_to_all_single(received, sent, received_sizes, sent_sizes); })
    return group.all_to_all_single(received, sent, received_sizes, sent_sizes);
  else
    return group.alltoall_base(received, sent, received_sizes, sent_sizes);
}

// Options of a collective with one root.
template <typename Options>
Options rooted(int64_t root) {
  Options options;
  options.rootRank = root;
  return options;
}

}  // namespace zero3
