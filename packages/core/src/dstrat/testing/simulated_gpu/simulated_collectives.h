// Collectives of a simulated device, over gloo.  It is included after simulated_device.h.

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace {

using Tensors = std::vector<at::Tensor>;
using Started = c10::intrusive_ptr<c10d::Work>;

class OverGloo : public c10d::Backend {
 public:
  OverGloo(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}

  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(c10d::OpType::BROADCAST, tensors, tensors, [&](Tensors, Tensors out) {
      return gloo_->broadcast(out, options);
    });
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(c10d::OpType::ALLREDUCE, tensors, tensors, [&](Tensors, Tensors out) {
      return reduce_each(out, options);
    });
  }
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return run(c10d::OpType::ALLREDUCE_COALESCED, tensors, tensors, [&](Tensors, Tensors out) {
      return reduce_each(out, options);
    });
  }
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run(c10d::OpType::REDUCE, tensors, tensors, [&](Tensors, Tensors out) {
      c10d::ReduceOptions summed = options;
      summed.reduceOp = of_gloo(options.reduceOp);
      gloo_->reduce(out, summed)->wait();
      if (getRank() == options.rootRank) divide(out, options.reduceOp);
      return Started();
    });
  }
  Started allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::ALLGATHER, inputs, flat(outputs), [&](Tensors in, Tensors out) {
      std::vector<Tensors> lists = unflat(out, outputs);
      return gloo_->allgather(lists, in, options);
    });
  }
  Started _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::_ALLGATHER_BASE, {input}, {output}, [&](Tensors in, Tensors out) {
      return gloo_->_allgather_base(out[0], in[0], options);
    });
  }
  Started allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::COALESCED, inputs, outputs, [&](Tensors in, Tensors out) {
      for (size_t index = 0; index < in.size(); ++index) gloo_->_allgather_base(out[index], in[index], options)->wait();
      return Started();
    });
  }
  Started gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return run(c10d::OpType::GATHER, inputs, flat(outputs), [&](Tensors in, Tensors out) {
      std::vector<Tensors> lists = unflat(out, outputs);
      return gloo_->gather(lists, in, options);
    });
  }
  Started scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return run(c10d::OpType::SCATTER, flat(inputs), outputs, [&](Tensors in, Tensors out) {
      std::vector<Tensors> lists = unflat(in, inputs);
      return gloo_->scatter(out, lists, options);
    });
  }
  Started reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return run(c10d::OpType::REDUCE_SCATTER, flat(inputs), outputs, [&](Tensors in, Tensors out) {
      std::vector<Tensors> lists = unflat(in, inputs);
      c10d::ReduceScatterOptions summed = options;
      summed.reduceOp = of_gloo(options.reduceOp);
      gloo_->reduce_scatter(out, lists, summed)->wait();
      divide(out, options.reduceOp);
      return Started();
    });
  }
  Started _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  Started reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return run(c10d::OpType::_REDUCE_SCATTER_BASE, inputs, outputs, [&](Tensors in, Tensors out) {
      c10d::ReduceScatterOptions summed = options;
      summed.reduceOp = of_gloo(options.reduceOp);
      for (size_t index = 0; index < in.size(); ++index)
        gloo_->_reduce_scatter_base(out[index], in[index], summed)->wait();
      divide(out, options.reduceOp);
      return Started();
    });
  }
  Started alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return run(c10d::OpType::ALLTOALL_BASE, {input}, {output}, [&](Tensors in, Tensors out) {
      return gloo_->alltoall_base(out[0], in[0], output_sizes, input_sizes, options);
    });
  }
  Started send(Tensors& tensors, int to, int tag) override {
    return run(c10d::OpType::SEND, tensors, {}, [&](Tensors in, Tensors) { return gloo_->send(in, to, tag); }, true);
  }
  Started recv(Tensors& tensors, int from, int tag) override {
    return run(
        c10d::OpType::RECV, {}, tensors, [&](Tensors, Tensors out) { return gloo_->recv(out, from, tag); }, true);
  }
  Started barrier(const c10d::BarrierOptions&) override {
    return run(c10d::OpType::BARRIER, {}, {}, [&](Tensors, Tensors) { return gloo_->barrier(c10d::BarrierOptions()); });
  }

 protected:
  using Transfer = std::function<Started(Tensors, Tensors)>;

  // Run a transfer on aliases of the inputs and outputs; a later one may go on when this returns.
  virtual Started run(
      c10d::OpType type, const Tensors& inputs, const Tensors& outputs, const Transfer& transfer,
      bool later = false) = 0;
  // Raise for a tensor that the collectives of the device do not take.
  virtual void check(const at::Tensor& tensor) const = 0;
  // The operation that gloo does for another one; it has no mean, which divide() makes of a sum.
  virtual c10d::ReduceOp of_gloo(const c10d::ReduceOp& operation) const {
    return operation == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : operation;
  }
  virtual void reduce_one(const at::Tensor& tensor, const c10d::AllreduceOptions& options) {
    Tensors one{tensor};
    gloo_->allreduce(one, options)->wait();
  }
  Tensors to_cpu(Call& call, const Tensors& tensors) const {
    Tensors cpu;
    for (const at::Tensor& tensor : tensors) {
      check(tensor);
      cpu.push_back(call.to_cpu(tensor));
    }
    return cpu;
  }

 private:
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors tensors;
    for (const Tensors& list : lists) tensors.insert(tensors.end(), list.begin(), list.end());
    return tensors;
  }
  static std::vector<Tensors> unflat(const Tensors& tensors, const std::vector<Tensors>& like) {
    std::vector<Tensors> lists;
    auto next = tensors.begin();
    for (const Tensors& list : like) {
      lists.emplace_back(next, next + static_cast<int64_t>(list.size()));
      next += static_cast<int64_t>(list.size());
    }
    return lists;
  }
  void divide(const Tensors& tensors, const c10d::ReduceOp& operation) const {
    if (operation == c10d::ReduceOp::AVG)
      for (const at::Tensor& tensor : tensors) at::Tensor(tensor).div_(getSize());
  }
  template <typename Options>
  Started reduce_each(const Tensors& tensors, const Options& options) {
    c10d::AllreduceOptions summed;
    summed.reduceOp = of_gloo(options.reduceOp);
    for (const at::Tensor& tensor : tensors) reduce_one(tensor, summed);
    divide(tensors, options.reduceOp);
    return {};
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace
