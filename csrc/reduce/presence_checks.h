// The presence checks of a reduction: which models it checks, and what ranks have told each other.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "reduce/begun_backwards.h"
#include "reduce/presence_check.h"
#include "support/autograd.h"

namespace zero3 {

// Owned by a Reduction, which calls it with its mutex locked.
class PresenceChecks {
 public:
  PresenceChecks(BegunBackwards& backwards, const GradientsToCome& to_come)
      : backwards_(backwards), to_come_(to_come) {}

  // Whether the checks of the parameter's model have begun.
  bool have_begun(const Parameter& parameter) const {
    return checked_.contains(parameter.model_number);
  }
  // Whether they have not begun, and this backward reduces gradients of that model.
  bool are_due(const Parameter& parameter);
  // Begins the checks of the parameter's model, and of all other models in this backward, once.
  void begin(const Parameter& parameter);
  // From here on, none are due.
  void end() { has_ended_ = true; }
  // Waits for the next check that is not finished, and returns it; null if all are finished.
  const PresenceCheck* finish_next();

  // In place of all these, outside of backwards: ranks tell each other which of `parameters` have
  // deposited gradients, and deposit zeros for those that only others have.
  void exchange_deposited(const std::vector<ParameterPtr>& parameters);

  // Whether a finished check found that ranks send the parameter's gradients at different times.
  bool is_mixed(const ParameterPtr& parameter) const;
  // Some ranks lack the gradient, and the backend needs one order on all ranks: it is sent after
  // all others.
  bool is_sent_last(const ParameterPtr& parameter) const {
    return !parameter->transport()->can.reduces_in_any_order && is_mixed(parameter);
  }
  // A dtype that holds all ranks' gradients of a mixed parameter; nullopt: as they arrive.
  std::optional<at::ScalarType> dtype_on_all_ranks(const ParameterPtr& parameter) const;
  // Numbers of the models with mixed parameters.
  std::set<int64_t> mixed_models() const;
  // Numbers of the checked models that have a parameter in this backward's graph.
  const std::set<int64_t>& models_in_graph() const { return in_graph_; }

  void clear();

 private:
  using Checks = std::vector<std::unique_ptr<PresenceCheck>>;
  // Begins checks of `parameters`.
  Checks checks_of(const std::vector<ParameterPtr>& parameters, Occasion occasion);

  BegunBackwards& backwards_;
  const GradientsToCome& to_come_;
  bool has_ended_ = false;
  std::set<int64_t> checked_;    // models
  std::set<int64_t> in_graph_;   // see models_in_graph()
  std::set<int64_t> unreduced_;  // models of which this backward reduces no gradient
  Checks checks_;
};

}  // namespace zero3
