// The registry that finds what a placeholder stands for.
#pragma once

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "parameter/parameter.h"

namespace zero3 {

// What a graph gathers by a placeholder.
struct Gatherable {
  SourcePtr source;
  ParameterPtr parameter;  // that has the source; null if the source stands in place of one
};

// Maps placeholders to parameters and sources. The key is the storage, which detached and traced
// aliases of a placeholder share. Owns nothing: a parameter lives as long as its Python owner.
class Registry {
 public:
  static Registry& get();

  // Registers `parameter`, by its placeholder if it has one. Assigns its order on the first call.
  void add(const ParameterPtr& parameter);
  // Registers a source that is gathered in place of a parameter, by its placeholder.
  void add(const SourcePtr& source);

  // Raises if no live parameter has this placeholder.
  ParameterPtr find(const at::Tensor& placeholder);
  ParameterPtr find_or_null(const at::Tensor& placeholder);
  // Takes a placeholder, or a parameter's ordinal: its order, as a tensor [1] of int64 in host
  // memory.
  ParameterPtr find_for_gradient(const at::Tensor& whose);
  // Raises if no live parameter or source has this placeholder.
  Gatherable find_gatherable(const at::Tensor& placeholder);

  // Returns the numbers of the sharded models that have live parameters.
  std::set<int64_t> live_model_numbers();

  // Returns the live parameters, in order of registration.
  std::vector<ParameterPtr> alive();
  // Returns the live parameters of one sharded model, in order of registration.
  std::vector<ParameterPtr> of_model(int64_t number);

 private:
  std::mutex mutex_;
  std::map<int64_t, std::weak_ptr<Parameter>> parameters_;  // by order
  // Either is empty.
  struct Entry {
    std::weak_ptr<Parameter> parameter;
    std::weak_ptr<Source> source;
  };
  Gatherable find_gatherable_or_null(const at::Tensor& placeholder);

  std::unordered_map<const c10::StorageImpl*, Entry> by_placeholder_;
  int64_t registered_ = 0;
};

}  // namespace zero3
