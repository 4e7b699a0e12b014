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

# Reads tested_torch_versions.txt, which is beside this file in an installed package.
function(lockstep_tested_torch result)
  foreach(folder ${CMAKE_CURRENT_FUNCTION_LIST_DIR} ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..)
    if(EXISTS ${folder}/tested_torch_versions.txt)
      file(STRINGS ${folder}/tested_torch_versions.txt versions REGEX "^[0-9]")
      list(TRANSFORM versions REPLACE " .*" "")
      set(${result} ${versions} PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# The tested releases as text: "1.13, 2.11 and 2.15".
function(lockstep_tested_torch_text result)
  lockstep_tested_torch(versions)
  list(TRANSFORM versions REPLACE "^([0-9]+\\.[0-9]+).*" "\\1")
  list(POP_BACK versions newest)
  list(JOIN versions ", " text)
  set(${result} "${text} and ${newest}" PARENT_SCOPE)
endfunction()

# Explains that a version is not tested; empty if its release is.
function(lockstep_untested_torch version result)
  lockstep_tested_torch(tested)
  list(TRANSFORM tested REPLACE "^([0-9]+\\.[0-9]+).*" "\\1")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" release "${version}")
  set(${result} "" PARENT_SCOPE)
  if(release IN_LIST tested)
    return()
  endif()
  lockstep_tested_torch_text(text)
  string(CONCAT explanation "LibTorch ${version} is not tested with this version of lockstep; the tested releases are "
    "${text}. If it does not compile, use one of them")
  set(${result} "${explanation}" PARENT_SCOPE)
endfunction()

# The Pythons of the environments of this name (a glob expression) that ./quickstart and ./test have made, the newest
# version first. The file `complete` ends an installation.
function(lockstep_python_environments name result)
  set(cache "$ENV{XDG_CACHE_HOME}")
  if(cache STREQUAL "")
    set(cache $ENV{HOME}/.cache)
  endif()
  file(GLOB complete ${cache}/lockstep/${name}/complete)
  list(SORT complete COMPARE NATURAL ORDER DESCENDING)
  list(TRANSFORM complete REPLACE "/complete$" /bin/python3)
  set(${result} "${complete}" PARENT_SCOPE)
endfunction()

# Lists the folders of TorchConfig.cmake that this machine has, in the order of preference: what the user names, the
# active Python environment, the system's package, other Pythons, and what --torch wheel installed.
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
  lockstep_python_environments(torch-* environments)
  file(GLOB system /usr/local/share/cmake/Torch /usr/share/cmake/Torch /usr/lib/*/cmake/Torch)
  foreach(candidate ${pythons} ${system} python3 /usr/bin/python3 ${environments})
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
    lockstep_tested_torch_text(lockstep_tested)
    message(FATAL_ERROR
      "LibTorch was not found. Install it (apt-get install libtorch-dev, or pip install torch), or set Torch_DIR or "
      "CMAKE_PREFIX_PATH to an unpacked LibTorch. The tested releases are ${lockstep_tested}.")
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
