// A program may be started with closed standard descriptors, for example by `program >&-` or by a service manager.
// The next file or socket that it opens would get the number 0, 1 or 2, and everything that prints would write into it.
// So the library opens /dev/null on these when it is loaded, before it opens anything itself.

#include <fcntl.h>

#include <cerrno>

namespace lockstep {
namespace {

/// open() returns the lowest free number, and the lower ones are open already.
[[maybe_unused]] const bool standard_descriptors_are_open = [] {
  for (int number = 0; number <= 2; ++number)
    if (::fcntl(number, F_GETFD) < 0 && errno == EBADF && ::open("/dev/null", O_RDWR) != number) return false;
  return true;
}();

}  // namespace
}  // namespace lockstep
