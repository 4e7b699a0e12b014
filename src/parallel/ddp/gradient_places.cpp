#include "parallel/ddp/gradient_places.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include "parallel/ddp/accumulator_hooks.h"

namespace lockstep {
namespace {

/// The places in which tensors were allocated, of all wrappers. It is never destroyed: tensors may outlive static
/// objects.
class TakenPlaces {
 public:
  static TakenPlaces& instance() {
    static auto* const places = new TakenPlaces;
    return *places;
  }

  void add(void* place, at::Tensor memory) {
    std::lock_guard lock(mutex_);
    memory_.emplace(place, std::move(memory));
  }

  bool contain(const void* place) const {
    std::lock_guard lock(mutex_);
    return memory_.count(place) > 0;
  }

  /// Returns false if no tensor was allocated there.
  bool remove(const void* place) {
    at::Tensor memory;  // released without the lock
    std::lock_guard lock(mutex_);
    const auto found = memory_.find(place);
    if (found == memory_.end()) return false;
    memory = std::move(found->second);
    memory_.erase(found);
    return true;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const void*, at::Tensor> memory_;  // guarded by mutex_; by place: the memory that it is a part of
};

}  // namespace

/// The places of one wrapper, and what is known of the allocations in its backward. Thread-safe.
class GradientPlaces::Offers {
 public:
  void open(const std::vector<Place>& places) {
    std::lock_guard lock(mutex_);
    is_open_ = true;
    places_.clear();
    for (auto& [bytes, size] : sizes_) {
      size.allocations = 0;
      size.seen.clear();
    }
    for (const auto& place : places) {
      if (excluded_.count(place.parameter)) continue;
      places_.emplace(place.parameter, place);
      sizes_[place.view.nbytes()];
    }
  }

  void close() {
    std::lock_guard lock(mutex_);
    is_open_ = false;
    places_.clear();
  }

  bool is_open() const {
    std::lock_guard lock(mutex_);
    return is_open_;
  }

  /// Counts an allocation of this size. Returns the place for it, which is then taken, or null.
  void* count(size_t bytes, bool may_take) {
    std::lock_guard lock(mutex_);
    const auto size = sizes_.find(bytes);
    if (!is_open_ || size == sizes_.end()) return nullptr;
    const auto expected = size->second.gradients.find(size->second.allocations++);
    if (!may_take || expected == size->second.gradients.end()) return nullptr;
    const auto place = places_.find(expected->second);
    if (place == places_.end() || is_taken(place->second.view)) return nullptr;
    void* const address = place->second.view.data_ptr();
    TakenPlaces::instance().add(address, place->second.memory);
    return address;
  }

  /// Call it with the memory that the allocation of the last count() got elsewhere.
  void note(size_t bytes, const void* memory) {
    std::lock_guard lock(mutex_);
    const auto size = sizes_.find(bytes);
    if (is_open_ && size != sizes_.end()) size->second.seen[memory] = size->second.allocations - 1;
  }

  void note_arrival(size_t parameter, const at::Tensor& gradient) {
    std::lock_guard lock(mutex_);
    const auto place = places_.find(parameter);
    if (place == places_.end()) return;
    const bool is_there = gradient.defined() && gradient.data_ptr() == place->second.view.data_ptr();
    auto& size = sizes_[place->second.view.nbytes()];
    places_.erase(place);
    if (is_there) return;
    std::erase_if(size.gradients, [&](const auto& item) { return item.second == parameter; });
    if (!gradient.defined() || gradient.layout() != c10::kStrided) return;
    if (const auto seen = size.seen.find(gradient.data_ptr()); seen != size.seen.end())
      size.gradients[seen->second] = parameter;
  }

  void exclude(size_t parameter) {
    std::lock_guard lock(mutex_);
    excluded_.insert(parameter);
    places_.erase(parameter);
  }

 private:
  /// Allocations of one size.
  struct Size {
    int64_t allocations = 0;                          // in this backward
    std::unordered_map<const void*, int64_t> seen{};  // in this backward: the last one that got this memory
    std::unordered_map<int64_t, size_t> gradients{};  // by number of the allocation: the parameter
  };

  mutable std::mutex mutex_;
  bool is_open_ = false;                      // guarded by mutex_, as all below
  std::unordered_map<size_t, Place> places_;  // by parameter
  std::unordered_map<size_t, Size> sizes_;    // by bytes
  std::unordered_set<size_t> excluded_;       // parameters
};

namespace {

/// What is offered to the backward on this thread; usually one or none.
struct Offered {
  std::vector<std::shared_ptr<GradientPlaces::Offers>> list{};
  ~Offered();
};
thread_local Offered offered;
thread_local bool is_any_offered = false;  // unlike the list, it exists until the thread has ended

Offered::~Offered() {
  is_any_offered = false;
}

/// Frees memory that PlacingAllocator has allocated.
void free_memory(void* memory);

/// Passes on what is not in a place.
class PlacingAllocator final : public c10::Allocator {
 public:
  explicit PlacingAllocator(c10::Allocator& before) : before_(before) {}

  // Not marked as override: allocate() is const in old versions of LibTorch only, and copy_data() is only in new ones.
  c10::DataPtr allocate(size_t bytes) { return allocate_in_place(bytes); }
  c10::DataPtr allocate(size_t bytes) const { return allocate_in_place(bytes); }
  void copy_data(void* to, const void* from, size_t bytes) const { std::memcpy(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const { return before_.raw_deleter() ? &free_memory : nullptr; }

  c10::Allocator& before() const { return before_; }

 private:
  c10::DataPtr allocate_in_place(size_t bytes) const {
    const bool may_be_gradient = is_any_offered && bytes >= GradientPlaces::kLeastBytes;
    if (!may_be_gradient || !current_backward_task().id) return before_.allocate(bytes);
    void* place = nullptr;
    for (const auto& offers : offered.list)
      if (void* const taken = offers->count(bytes, /*may_take=*/!place)) place = taken;
    if (place) return {place, place, &free_memory, c10::Device(c10::kCPU)};
    auto memory = before_.allocate(bytes);
    for (const auto& offers : offered.list) offers->note(bytes, memory.get());
    return memory;
  }

  c10::Allocator& before_;
};

/// Keeps the code of this library in memory when a plugin that uses it is closed: the allocator stays.
void stay_loaded() {
  Dl_info self;
  if (::dladdr(reinterpret_cast<const void*>(&free_memory), &self) != 0)
    ::dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

/// Returns the allocator, and installs it in the first call. If the program has set one with a higher priority, it
/// stays in use, and gradients are copied.
const PlacingAllocator& placing_allocator() {
  static const auto* const installed = [] {
    stay_loaded();
    auto* const allocator = new PlacingAllocator(*c10::GetCPUAllocator());
    c10::SetCPUAllocator(allocator);
    return allocator;
  }();
  return *installed;
}

void free_memory(void* memory) {
  if (!TakenPlaces::instance().remove(memory)) placing_allocator().before().raw_deleter()(memory);
}

}  // namespace

GradientPlaces::GradientPlaces() : offers_(std::make_shared<Offers>()) {}

GradientPlaces::~GradientPlaces() {
  offers_->close();
}

void GradientPlaces::install() {
  placing_allocator();
}

void GradientPlaces::offer(const std::vector<Place>& places) {
  if (places.empty()) return;
  offers_->open(places);
  std::erase_if(offered.list, [](const auto& offers) { return !offers->is_open(); });  // closed by other threads
  if (std::find(offered.list.begin(), offered.list.end(), offers_) == offered.list.end())
    offered.list.push_back(offers_);
  is_any_offered = true;
}

void GradientPlaces::note_arrival(size_t parameter, const at::Tensor& gradient) {
  offers_->note_arrival(parameter, gradient);
}

void GradientPlaces::withdraw() const {
  offers_->close();
  std::erase(offered.list, offers_);
  is_any_offered = !offered.list.empty();
}

void GradientPlaces::exclude(size_t parameter) {
  offers_->exclude(parameter);
}

bool GradientPlaces::is_taken(const at::Tensor& view) {
  return TakenPlaces::instance().contain(view.data_ptr());
}

}  // namespace lockstep
