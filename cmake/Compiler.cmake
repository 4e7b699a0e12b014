# How every target of this project is compiled.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES AND PROJECT_IS_TOP_LEVEL)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, Debug or RelWithDebInfo" FORCE)
endif()

find_program(CCACHE ccache)
if(CCACHE AND PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # A precompiled header makes ccache refuse unless it is told that time stamps and macros do not matter in one.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE})
endif()

set(CMAKE_UNITY_BUILD ${LOCKSTEP_UNITY})
if(NOT DEFINED CMAKE_UNITY_BUILD_BATCH_SIZE)
  set(CMAKE_UNITY_BUILD_BATCH_SIZE 24)
endif()

add_library(lockstep_compile_options INTERFACE)
target_compile_features(lockstep_compile_options INTERFACE cxx_std_20)
target_compile_options(lockstep_compile_options INTERFACE -Wall -Wextra)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(lockstep_compile_options INTERFACE -fpch-preprocess)  # ccache needs it with precompiled headers
  # No garbage collection below 1 GiB: LibTorch's headers alone fill more than the default. Saves 7 % of GCC's time.
  target_compile_options(lockstep_compile_options INTERFACE "SHELL:--param ggc-min-heapsize=1048576")
  # GCC 12 warns wrongly about std::string's own copies and, with sanitizers and -O1, about torch's optionals.
  # ThreadSanitizer does not see fences; shm and the allocator of gradients have one.
  target_compile_options(lockstep_compile_options INTERFACE -Wno-restrict -Wno-maybe-uninitialized)
  if(LOCKSTEP_SANITIZE)
    target_compile_options(lockstep_compile_options INTERFACE -Wno-tsan)
  endif()
endif()
if(LOCKSTEP_WERROR)
  target_compile_options(lockstep_compile_options INTERFACE -Werror)
endif()
if(LOCKSTEP_SANITIZE)
  # What a sanitizer finds ends the test. The check of vptr is left out: it reports falsely when no descriptors are left.
  set(sanitize -fsanitize=${LOCKSTEP_SANITIZE} -fno-sanitize=vptr -fno-sanitize-recover=all)
  target_compile_options(lockstep_compile_options INTERFACE ${sanitize} -fno-omit-frame-pointer -g)
  target_link_options(lockstep_compile_options INTERFACE ${sanitize})
endif()

# optimize(LEVEL): how much releases are optimized from here on, in this folder. Compiling takes half as long with -O1 as
# with -O3.
macro(optimize level)
  string(REGEX REPLACE "-O[123]" "${level}" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")
  string(REGEX REPLACE "-O[123]" "${level}" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")
endmacro()
