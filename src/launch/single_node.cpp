#include "base/text.h"
#include "launch/cluster.h"

namespace lockstep {
namespace {

class SingleNode final : public Cluster {
 public:
  SingleNode(const LaunchOptions& options, const Plan& plan, const Secret& secret)
      : max_restarts_(options.max_restarts),
        workers_(plan.workers),
        endpoint_(plan.node.store),
        job_id_(plan.job_id),
        secret_(secret) {}

  std::optional<Layout> begin(int generation, Signals&, const PrintStatus&) override {
    generation_ = generation;
    verdict_.reset();
    store_.reset();  // frees the port for the new store
    store_ = std::make_unique<StoreServer>(StoreServer::Options{endpoint_, secret_, generation, "lockstep run"});
    return Layout{0, workers_, generation, {endpoint_.host, store_->port()}, job_id_};
  }

  void report_failure(const Failure& cause) override { store_->end_job(cause); }
  std::optional<std::vector<MissingRank>> missing_ranks() override {
    const auto joined = store_->joined();
    std::vector<MissingRank> missing;
    for (int rank = 0; rank < workers_; ++rank)
      if (!joined.contains(rank)) missing.push_back({rank, ""});
    return missing;
  }

  bool has_joined_ranks() override { return !store_->joined().empty(); }
  void forward_signal(int) override {}
  int fd() const override { return -1; }
  std::optional<int> next_order() override { return std::nullopt; }

  void report_outcome(const Outcome& outcome) override {
    verdict_ = decide(outcome, store_->first_cause(), generation_, max_restarts_);
  }
  std::optional<Verdict> verdict() override { return verdict_; }

 private:
  const int max_restarts_;
  const int workers_;
  const Endpoint endpoint_;
  const std::string job_id_;
  const Secret secret_;
  int generation_ = 0;
  std::unique_ptr<StoreServer> store_;
  std::optional<Verdict> verdict_;
};

}  // namespace

std::unique_ptr<Cluster> make_single_node(const LaunchOptions& options, const Plan& plan, const Secret& secret) {
  return std::make_unique<SingleNode>(options, plan, secret);
}

}  // namespace lockstep
