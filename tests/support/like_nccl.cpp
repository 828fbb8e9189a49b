// A backend for CPUs that this library takes for NCCL's: it takes tensors that NCCL takes, and runs
// over gloo.
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

void check(const at::Tensor& tensor, at::ScalarType dtype) {
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "like NCCL: a tensor of ", tensor.sizes(),
              " by ", tensor.strides());
  TORCH_CHECK(tensor.scalar_type() == dtype, "like NCCL: ", tensor.scalar_type(), " beside ",
              dtype);
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kByte:
    case at::kChar:
    case at::kBool:
    case at::kInt:
    case at::kLong:
      return;
    default:
      TORCH_CHECK(false, "like NCCL: dtype ", dtype);
  }
}

class LikeNccl : public c10d::Backend {
 public:
  explicit LikeNccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check(tensors.at(0), tensors[0].scalar_type());
    return gloo_->broadcast(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check(tensors.at(0), tensors[0].scalar_type());
    return gloo_->reduce(tensors, options);
  }
  WorkPtr _allgather_base(at::Tensor& full, at::Tensor& shard,
                          const c10d::AllgatherOptions& options) override {
    check(full, shard.scalar_type());
    check(shard, shard.scalar_type());
    TORCH_CHECK(full.numel() == getSize() * shard.numel());
    return gloo_->_allgather_base(full, shard, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& fulls, Tensors& shards,
                                          const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < fulls.size(); ++i) {
      check(fulls[i], fulls[0].scalar_type());
      check(shards[i], fulls[0].scalar_type());
      TORCH_CHECK(fulls[i].numel() == getSize() * shards[i].numel());
    }
    return gloo_->allgather_into_tensor_coalesced(fulls, shards, options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& shard, at::Tensor& full,
                               const c10d::ReduceScatterOptions& options) override {
    check(full, shard.scalar_type());
    check(shard, shard.scalar_type());
    TORCH_CHECK(full.numel() == getSize() * shard.numel());
    return gloo_->_reduce_scatter_base(shard, full, options);
  }

  // What torch's own code and tests call.
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return gloo_->allreduce(tensors, options);
  }
  WorkPtr allgather(std::vector<Tensors>& fulls, Tensors& shards,
                    const c10d::AllgatherOptions& options) override {
    return gloo_->allgather(fulls, shards, options);
  }
  WorkPtr gather(std::vector<Tensors>& fulls, Tensors& shards,
                 const c10d::GatherOptions& options) override {
    return gloo_->gather(fulls, shards, options);
  }
  WorkPtr scatter(Tensors& shards, std::vector<Tensors>& fulls,
                  const c10d::ScatterOptions& options) override {
    return gloo_->scatter(shards, fulls, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& shards, Tensors& fulls,
                                          const c10d::ReduceScatterOptions& options) override {
    return gloo_->reduce_scatter_tensor_coalesced(shards, fulls, options);
  }
  WorkPtr alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_sizes,
                        std::vector<int64_t>& from_sizes,
                        const c10d::AllToAllOptions& options) override {
    return gloo_->alltoall_base(to, from, to_sizes, from_sizes, options);
  }
  WorkPtr send(Tensors& tensors, int to, int /*tag*/) override {
    check(tensors.at(0), tensors[0].scalar_type());
    return gloo_->send(tensors, to, 0);
  }
  WorkPtr recv(Tensors& tensors, int from, int /*tag*/) override {
    check(tensors.at(0), tensors[0].scalar_type());
    return gloo_->recv(tensors, from, 0);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  const c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch.distributed");
  py::class_<LikeNccl, c10::intrusive_ptr<LikeNccl>, c10d::Backend>(module, "LikeNccl")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}
