# Finds what the project stands on and remembers it for the summary.

include(LockstepFindTorch)

option(LOCKSTEP_REQUIRE_CUDA "Stop when LibTorch cannot use GPUs" OFF)

# part(NAME FOUND DETAIL REMEDY): a row of the summary.
function(part name found detail remedy)
  string(SUBSTRING "${name}            " 0 12 label)
  if(found)
    set_property(GLOBAL APPEND_STRING PROPERTY parts_table "  ${label} yes   ${detail}\n")
  else()
    set_property(GLOBAL APPEND_STRING PROPERTY parts_table "  ${label} no    ${detail}; to get it: ${remedy}\n")
    set_property(GLOBAL APPEND_STRING PROPERTY parts_missing "${name}: ${detail}; to get it: ${remedy}\n")
  endif()
endfunction()

# The Python whose PyTorch this LibTorch is part of; nothing for a LibTorch that belongs to none.
function(lockstep_python_of_torch result)
  string(REGEX REPLACE "/lib/python[^/]*/[a-z]+-packages/torch/share/cmake/Torch$" "/bin/python3" python "${Torch_DIR}")
  if(python STREQUAL Torch_DIR OR NOT EXISTS "${python}")
    set(python "")
  endif()
  set(${result} "${python}" PARENT_SCOPE)
endfunction()

function(print_parts)
  get_property(table GLOBAL PROPERTY parts_table)
  get_property(missing GLOBAL PROPERTY parts_missing)
  message(STATUS "lockstep ${PROJECT_VERSION}, ${CMAKE_BUILD_TYPE}, ${CMAKE_CXX_COMPILER_ID} "
                 "${CMAKE_CXX_COMPILER_VERSION}, ${CMAKE_SYSTEM_PROCESSOR}\n${table}")
  file(WRITE ${CMAKE_BINARY_DIR}/parts_missing.txt "${missing}")  # ./test lists these at the end of a run
endfunction()

# Torch's targets must reach a project that adds this one as a subdirectory.
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
lockstep_find_torch()
lockstep_untested_torch("${Torch_VERSION}" untested)
if(untested)
  string(PREPEND untested ". Warning: ")
endif()
part("LibTorch" TRUE "${Torch_VERSION} in ${TORCH_INSTALL_PREFIX}${untested}" "")
file(WRITE ${CMAKE_BINARY_DIR}/torch_version.txt "${Torch_VERSION}\n")  # ./test lists what it tested

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(OpenSSL 3.0 REQUIRED)
find_package(ZLIB REQUIRED)
find_package(nlohmann_json REQUIRED)
part("spdlog" TRUE "${spdlog_VERSION}" "")
part("OpenSSL" TRUE "${OPENSSL_VERSION}" "")
part("JSON" TRUE "nlohmann-json ${nlohmann_json_VERSION}" "")
if(LOCKSTEP_TOOLS OR LOCKSTEP_TESTS)
  find_package(CLI11 REQUIRED)
  part("CLI11" TRUE "${CLI11_VERSION}" "")
endif()

find_package(Gloo QUIET CONFIG)
if(Gloo_FOUND AND NOT TARGET gloo)
  set(Gloo_FOUND FALSE)
endif()
part("Gloo" "${Gloo_FOUND}" "backend gloo: processes on one or several hosts" "apt-get install libgloo-dev")

set(MPI_CXX_SKIP_MPICXX ON)  # its bindings for C++, which are deprecated
find_package(MPI QUIET COMPONENTS CXX)
part("MPI" "${MPI_CXX_FOUND}" "backend mpi: processes that mpirun starts" "apt-get install openmpi-bin libopenmpi-dev")

find_path(LMDB_INCLUDE_DIR lmdb.h)
find_library(LMDB_LIBRARY lmdb)
if(LMDB_INCLUDE_DIR AND LMDB_LIBRARY)
  set(LMDB_FOUND TRUE)
else()
  set(LMDB_FOUND FALSE)
endif()
part("LMDB" "${LMDB_FOUND}" "LmdbReader, LmdbDataset and LmdbWriter" "apt-get install liblmdb-dev")

if(TARGET torch_cuda)
  # PyTorch's wheel brings NCCL in a package beside it, without the name that a linker looks for.
  set(wheel_nccl ${TORCH_INSTALL_PREFIX}/../nvidia/nccl)
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${wheel_nccl}/include)
  find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${wheel_nccl}/lib)
  find_package(CUDAToolkit QUIET)
  if(NCCL_INCLUDE_DIR AND NCCL_LIBRARY AND CUDAToolkit_FOUND)
    set(NCCL_FOUND TRUE)
  else()
    set(NCCL_FOUND FALSE)
  endif()
  part("CUDA, NCCL" ${NCCL_FOUND} "backend nccl: processes with a GPU each" "apt-get install libnccl-dev")
else()
  if(TORCH_WITHOUT_CUDA)
    set(why "only the CPU part of this LibTorch is used: there is no CUDA toolkit (nvcc)")
    set(remedy "install the CUDA toolkit, or set CUDA_HOME")
  else()
    set(why "this LibTorch is for CPUs")
    set(remedy "install a CUDA build of PyTorch or LibTorch")
  endif()
  if(LOCKSTEP_REQUIRE_CUDA)
    message(FATAL_ERROR "LOCKSTEP_REQUIRE_CUDA is on, but lockstep cannot use GPUs with LibTorch ${Torch_VERSION} in "
                        "${TORCH_INSTALL_PREFIX}: ${why}. To change that, ${remedy}.")
  endif()
  part("CUDA, NCCL" FALSE "${why}" "${remedy}")
endif()
