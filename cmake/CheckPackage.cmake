# Read by CPack before it makes a package: a Debian package must depend on Debian's LibTorch, which is in /usr.
if(NOT CPACK_LOCKSTEP_TORCH MATCHES "^/usr/(lib|share)/")
  message(FATAL_ERROR "A Debian package needs Debian's LibTorch, but this build uses ${CPACK_LOCKSTEP_TORCH}. Use "
                      "cmake --workflow --preset deb, with libtorch-dev installed.")
endif()
