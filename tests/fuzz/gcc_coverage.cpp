// Lets libFuzzer see which code runs. Clang cannot compile LibTorch 1.13 as C++20, so GCC compiles the fuzzers. Its
// -fsanitize-coverage=trace-pc calls a function in every block of code; this one counts the calls per address, in
// counters that libFuzzer watches.

#include <cstddef>
#include <cstdint>
#include <iterator>

extern "C" void __sanitizer_cov_8bit_counters_init(uint8_t* begin, uint8_t* end);

namespace {

constexpr int kBits = 16;
uint8_t counters[size_t{1} << kBits];
[[maybe_unused]] const bool is_registered = (__sanitizer_cov_8bit_counters_init(counters, std::end(counters)), true);

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  const auto address = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  ++counters[address * 0x9E3779B97F4A7C15 >> (64 - kBits)];
}

// GCC calls these two; libFuzzer has none.
extern "C" void __sanitizer_cov_trace_cmpf(float, float) {}
extern "C" void __sanitizer_cov_trace_cmpd(double, double) {}
