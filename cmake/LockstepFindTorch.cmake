# Finds LibTorch: in CMAKE_PREFIX_PATH, else where the system keeps packages (apt), else in an installed Python wheel.
# A macro, so that Torch's variables reach the caller. Installed with the package, whose users search the same way.
macro(lockstep_find_torch)
  find_package(Torch 1.13 QUIET CONFIG)
  if(NOT Torch_FOUND)
    foreach(python python3 /usr/bin/python3)
      execute_process(
        COMMAND ${python} -c "import torch; print(torch.utils.cmake_prefix_path)"
        OUTPUT_VARIABLE lockstep_wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE lockstep_no_wheel)
      if(lockstep_no_wheel EQUAL 0 AND EXISTS "${lockstep_wheel}")
        find_package(Torch 1.13 QUIET CONFIG PATHS ${lockstep_wheel} NO_DEFAULT_PATH)
        if(Torch_FOUND)
          break()
        endif()
      endif()
    endforeach()
  endif()
  if(NOT Torch_FOUND)
    message(FATAL_ERROR
      "LibTorch was not found. Install it (apt-get install libtorch-dev), install PyTorch's wheel for python3, or set "
      "CMAKE_PREFIX_PATH to an unpacked LibTorch. Versions from 1.13 on work.")
  endif()
  if("${TORCH_CXX_FLAGS}" MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
    message(FATAL_ERROR
      "LibTorch in ${Torch_DIR} was built with the old C++ ABI, which the system's libraries do not share. Use the "
      "cxx11 ABI build of LibTorch, or a wheel from 2.6 on.")
  endif()
endmacro()
