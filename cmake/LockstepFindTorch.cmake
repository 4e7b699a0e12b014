# Finds LibTorch. Installed with the package, whose users search the same way. As a script,
#   cmake -P cmake/LockstepFindTorch.cmake
# it prints every LibTorch of this machine, the one that is used first: its version and the folder of TorchConfig.cmake.

# The LibTorch inside of a Python environment; nothing if there is none.
function(lockstep_torch_of_python python result)
  set(${result} "" PARENT_SCOPE)
  execute_process(
    COMMAND ${python} -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(failed EQUAL 0 AND EXISTS "${folder}/share/cmake/Torch/TorchConfig.cmake")
    set(${result} "${folder}/share/cmake/Torch" PARENT_SCOPE)
  endif()
endfunction()

# Lists the folders of TorchConfig.cmake that this machine has, in the order of preference: what the user names, the
# active Python environment, the system's package, other Pythons, and what ./quickstart --torch wheel installed.
function(lockstep_list_torch result)
  set(found "")
  foreach(folder "${Torch_DIR}" "$ENV{Torch_DIR}")
    if(EXISTS "${folder}/TorchConfig.cmake")
      list(APPEND found ${folder})
    endif()
  endforeach()
  string(REPLACE ":" ";" named "$ENV{CMAKE_PREFIX_PATH}")
  foreach(prefix ${CMAKE_PREFIX_PATH} ${named})
    foreach(folder ${prefix} ${prefix}/Torch ${prefix}/share/cmake/Torch)
      if(EXISTS ${folder}/TorchConfig.cmake)
        list(APPEND found ${folder})
      endif()
    endforeach()
  endforeach()
  set(pythons "")
  foreach(environment VIRTUAL_ENV CONDA_PREFIX)
    if(NOT "$ENV{${environment}}" STREQUAL "")
      list(APPEND pythons $ENV{${environment}}/bin/python)
    endif()
  endforeach()
  if("$ENV{XDG_CACHE_HOME}" STREQUAL "")
    set(cache $ENV{HOME}/.cache)
  else()
    set(cache $ENV{XDG_CACHE_HOME})
  endif()
  file(GLOB system /usr/local/share/cmake/Torch /usr/share/cmake/Torch /usr/lib/*/cmake/Torch)
  foreach(candidate ${pythons} ${system} python3 /usr/bin/python3 ${cache}/lockstep/torch/bin/python)
    if(EXISTS ${candidate}/TorchConfig.cmake)
      list(APPEND found "${candidate}")
    elseif(NOT IS_DIRECTORY ${candidate})
      lockstep_torch_of_python(${candidate} folder)
      if(folder)
        list(APPEND found ${folder})
      endif()
    endif()
  endforeach()
  list(REMOVE_DUPLICATES found)
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

# Defines the target torch for the CPU part of a LibTorch built for CUDA. Its own configuration insists on nvcc.
macro(lockstep_import_torch_without_cuda folder)
  set(Torch_DIR ${folder} CACHE PATH "The folder of TorchConfig.cmake" FORCE)
  get_filename_component(TORCH_INSTALL_PREFIX ${folder}/../../.. ABSOLUTE)
  set(PACKAGE_FIND_VERSION 1.13)
  include(${folder}/TorchConfigVersion.cmake)
  set(Torch_VERSION ${PACKAGE_VERSION})
  set(Torch_FOUND TRUE)
  set(TORCH_WITHOUT_CUDA TRUE)
  if(NOT TARGET torch)
    add_library(torch INTERFACE IMPORTED GLOBAL)
    target_include_directories(torch INTERFACE
      ${TORCH_INSTALL_PREFIX}/include ${TORCH_INSTALL_PREFIX}/include/torch/csrc/api/include)
    target_link_libraries(torch INTERFACE ${TORCH_INSTALL_PREFIX}/lib/libtorch_cpu.so ${TORCH_INSTALL_PREFIX}/lib/libc10.so)
  endif()
  set(TORCH_LIBRARIES torch)
endmacro()

# Defines the target torch. A macro, so that Torch's variables reach the caller.
macro(lockstep_find_torch)
  lockstep_list_torch(lockstep_torches)
  if(NOT lockstep_torches)
    message(FATAL_ERROR
      "LibTorch was not found. Install it (apt-get install libtorch-dev, or pip install torch), or set Torch_DIR or "
      "CMAKE_PREFIX_PATH to an unpacked LibTorch. Versions from 1.13 on work.")
  endif()
  list(GET lockstep_torches 0 lockstep_torch_folder)
  find_program(LOCKSTEP_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin
    DOC "The CUDA toolkit's compiler; without it lockstep uses the CPU part of LibTorch")
  get_filename_component(lockstep_torch_cuda ${lockstep_torch_folder}/../../../lib/libtorch_cuda.so ABSOLUTE)
  if(EXISTS ${lockstep_torch_cuda} AND NOT LOCKSTEP_NVCC)
    lockstep_import_torch_without_cuda(${lockstep_torch_folder})
  else()
    find_package(Torch 1.13 REQUIRED QUIET CONFIG PATHS ${lockstep_torch_folder} NO_DEFAULT_PATH)
  endif()
  if("${TORCH_CXX_FLAGS}" MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
    message(FATAL_ERROR
      "LibTorch in ${Torch_DIR} was built with the old C++ ABI, which the system's libraries do not share. Use the "
      "cxx11 ABI build of LibTorch, or a wheel from 2.6 on.")
  endif()
endmacro()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  lockstep_list_torch(torches)
  foreach(folder ${torches})
    set(PACKAGE_FIND_VERSION 1.13)
    include(${folder}/TorchConfigVersion.cmake)
    execute_process(COMMAND ${CMAKE_COMMAND} -E echo "${PACKAGE_VERSION} ${folder}")  # message() writes to stderr
  endforeach()
endif()
