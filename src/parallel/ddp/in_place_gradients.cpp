#include "parallel/ddp/in_place_gradients.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include "parallel/ddp/accumulator_hooks.h"

// Overview: how the n-th allocation is learned.
//
// Backward of the same model makes the same allocations in the same order, as long as the program does not change. So
// "the parameter's gradient is the 7th allocation of 4 MiB in this backward" is a good prediction after one backward in
// which it was true.
//
// 1. reserve() sets the places of the gradients for a thread when its backward begins, and resets the counts.
// 2. The allocator counts the allocations of that thread during backward, by size, if a gradient has this size. If a
//    gradient was seen at this count before, the allocator returns the gradient's place in the bucket
//    (Reservations::count). Otherwise it allocates memory and remembers the count for the address (note).
// 3. When autograd has accumulated a gradient, release() compares. If the gradient is in its place, the prediction was
//    right, and nothing is copied. If it has another address, the count of that address is the prediction for the next
//    backward (note_arrival), and the bucket copies the gradient.
// 4. A tensor in the place that is not the gradient, or not only the gradient, keeps the memory: the bucket moves to
//    new memory, and no place is reserved for this parameter any more (exclude).
//
// In the first backward there are no predictions, so all gradients are copied. The deleter of a tensor in a place only
// removes the entry in PlacesInUse, which keeps the bucket's memory until then.

namespace lockstep {
namespace {

/// The places of all wrappers in which tensors were allocated. Never destroyed: tensors may outlive static objects.
class PlacesInUse {
 public:
  static PlacesInUse& instance() {
    static auto* const places = new PlacesInUse;
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

  /// Returns false if no tensor was allocated in this place.
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
  std::unordered_map<const void*, at::Tensor>
      memory_;  // guarded by mutex_; by place: the memory that contains the place
};

}  // namespace

/// The places of one wrapper, and the predicted allocations of its backward. Thread-safe.
class InPlaceGradients::Reservations {
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
    PlacesInUse::instance().add(address, place->second.memory);
    return address;
  }

  /// Call it with the memory of the allocation of the last count(), if count() has returned null.
  void note(size_t bytes, const void* memory) {
    std::lock_guard lock(mutex_);
    const auto size = sizes_.find(bytes);
    if (is_open_ && size != sizes_.end()) size->second.seen[memory] = size->second.allocations - 1;
  }

  void note_arrival(size_t parameter, const at::Tensor& gradient) {
    std::lock_guard lock(mutex_);
    const auto place = places_.find(parameter);
    if (place == places_.end()) return;
    const bool is_in_place = gradient.defined() && gradient.data_ptr() == place->second.view.data_ptr();
    auto& size = sizes_[place->second.view.nbytes()];
    places_.erase(place);
    if (is_in_place) return;
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
    int64_t allocations = 0;  // in this backward
    std::unordered_map<const void*, int64_t>
        seen{};  // in this backward: the number of the last allocation that got this memory
    std::unordered_map<int64_t, size_t> gradients{};  // by number of the allocation: the parameter
  };

  mutable std::mutex mutex_;
  bool is_open_ = false;                      // guarded by mutex_, as all below
  std::unordered_map<size_t, Place> places_;  // by parameter
  std::unordered_map<size_t, Size> sizes_;    // by bytes
  std::unordered_set<size_t> excluded_;       // parameters
};

namespace {

/// The reservations for the backward on this thread; usually one or none.
struct ThreadReservations {
  std::vector<std::shared_ptr<InPlaceGradients::Reservations>> list{};
  ~ThreadReservations();
};
thread_local ThreadReservations reserved;
thread_local bool is_any_reserved = false;  // unlike the list, it exists until the thread has ended

ThreadReservations::~ThreadReservations() {
  is_any_reserved = false;
}

/// Frees memory that InPlaceAllocator has allocated.
void free_memory(void* memory);

/// The allocator that InPlaceAllocator replaced. Atomic, because other threads read it as soon as LibTorch has the new
/// allocator, which it keeps in a plain variable.
std::atomic<c10::Allocator*> previous_allocator = nullptr;

/// Forwards other allocations to the previous allocator.
class InPlaceAllocator final : public c10::Allocator {
 public:
  // Not marked as override: allocate() is const in old versions of LibTorch only, and copy_data() is only in new ones.
  c10::DataPtr allocate(size_t bytes) { return allocate_in_place(bytes); }
  c10::DataPtr allocate(size_t bytes) const { return allocate_in_place(bytes); }
  void copy_data(void* to, const void* from, size_t bytes) const { std::memcpy(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const { return previous_allocator.load()->raw_deleter() ? &free_memory : nullptr; }

 private:
  static c10::DataPtr allocate_in_place(size_t bytes) {
    const bool may_be_gradient = is_any_reserved && bytes >= InPlaceGradients::kMinBytes;
    auto& previous = *previous_allocator.load();
    if (!may_be_gradient || !current_backward_task().id) return previous.allocate(bytes);
    void* place = nullptr;
    for (const auto& reservations : reserved.list)
      if (void* const taken = reservations->count(bytes, /*may_take=*/!place)) place = taken;
    if (place) return {place, place, &free_memory, c10::Device(c10::kCPU)};
    auto memory = previous.allocate(bytes);
    for (const auto& reservations : reserved.list) reservations->note(bytes, memory.get());
    return memory;
  }
};

/// Keeps the code of this library in memory when a plugin that uses it is closed: the allocator stays.
void stay_loaded() {
  Dl_info self;
  if (::dladdr(reinterpret_cast<const void*>(&free_memory), &self) != 0)
    ::dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

void free_memory(void* memory) {
  if (!PlacesInUse::instance().remove(memory)) previous_allocator.load()->raw_deleter()(memory);
}

}  // namespace

InPlaceGradients::InPlaceGradients() : reservations_(std::make_shared<Reservations>()) {}

InPlaceGradients::~InPlaceGradients() {
  reservations_->close();
}

// If the program has set an allocator with a higher priority, it stays in use, and gradients are copied into their
// buckets.
void InPlaceGradients::install() {
  [[maybe_unused]] static const bool is_installed = [] {
    stay_loaded();
    previous_allocator = c10::GetCPUAllocator();
    std::atomic_thread_fence(std::memory_order_release);  // SetCPUAllocator has none
    c10::SetCPUAllocator(new InPlaceAllocator);
    return true;
  }();
}

void InPlaceGradients::reserve(const std::vector<Place>& places) {
  if (places.empty()) return;
  reservations_->open(places);
  std::erase_if(reserved.list, [](const auto& reservations) { return !reservations->is_open(); });  // by other threads
  if (std::find(reserved.list.begin(), reserved.list.end(), reservations_) == reserved.list.end())
    reserved.list.push_back(reservations_);
  is_any_reserved = true;
}

void InPlaceGradients::withdraw() const {
  reservations_->close();
  std::erase(reserved.list, reservations_);
  is_any_reserved = !reserved.list.empty();
}

namespace {

/// Whether no tensors use the memory except `gradient`, which is also .grad(), and `arrived`, which autograd drops when
/// the hook returns. `arrived` may be a view, which keeps its base.
bool is_memory_its_own(const at::Tensor& gradient, const at::Tensor& arrived) {
  constexpr size_t kHandles = 2;  // .grad(), and the caller's
  if (gradient.use_count() > kHandles) return false;
  size_t users = 1;
  const bool is_dense = arrived.defined() && arrived.layout() == c10::kStrided;
  if (is_dense && !arrived.is_same(gradient) && arrived.is_alias_of(gradient)) {
    ++users;
    if (arrived.is_view()) {
      if (arrived._base().use_count() > 1) return false;
      ++users;
    }
  }
  return gradient.storage().use_count() <= users;
}

}  // namespace

void InPlaceGradients::release(size_t parameter, Bucket& bucket, size_t slot, const at::Tensor& gradient,
                               const at::Tensor& arrived) {
  const auto& place = bucket.gradient(slot);
  reservations_->note_arrival(parameter, gradient);
  if (!is_taken(place)) return;
  const bool is_in_place = gradient.defined() && same_memory(gradient, place);
  if (is_in_place && is_memory_its_own(gradient, arrived)) return;
  reservations_->exclude(parameter);
  withdraw();  // the other places are in the old memory, and the new memory must not be allocated in a place
  bucket.move();
}

bool InPlaceGradients::is_taken(const at::Tensor& view) {
  return PlacesInUse::instance().contain(view.data_ptr());
}

}  // namespace lockstep
