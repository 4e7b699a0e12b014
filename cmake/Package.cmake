# What `cmake --install` and CPack put where find_package(lockstep CONFIG) and pkg-config find it. Two components, which
# are two Debian packages: runtime (libraries and the command) and dev (what a compiler needs).

include(CMakePackageConfigHelpers)
include(LockstepPrecompileHeaders)  # for projects that build lockstep themselves

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)
install(TARGETS lockstep EXPORT lockstepTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT dev)
if(Gloo_FOUND)
  install(TARGETS lockstep_gloo LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime)
endif()
install(DIRECTORY include/lockstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT dev)
install(EXPORT lockstepTargets NAMESPACE lockstep:: DESTINATION ${package_dir} COMPONENT dev)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" lockstep_torch_release "${Torch_VERSION}")
configure_package_config_file(cmake/lockstepConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/lockstepConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/lockstepConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/lockstepConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/lockstepConfigVersion.cmake
              cmake/LockstepFindTorch.cmake cmake/LockstepPrecompileHeaders.cmake tested_torch_versions.txt
        DESTINATION ${package_dir} COMPONENT dev)

# --- pkg-config: the flags of LibTorch are those of the LibTorch that lockstep was built with. Libraries in folders that
# the system does not search are found by an rpath.
if(CMAKE_INSTALL_PREFIX STREQUAL "/usr")
  set(lockstep_pc_prefix /usr)
  set(lockstep_pc_rpath "")
else()
  file(RELATIVE_PATH up /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
  string(REGEX REPLACE "/$" "" up "${up}")
  set(lockstep_pc_prefix "\${pcfiledir}/${up}")
  set(lockstep_pc_rpath "-Wl,-rpath,\${libdir} ")
endif()
get_target_property(torch_folders torch INTERFACE_INCLUDE_DIRECTORIES)
set(lockstep_torch_cflags "${TORCH_CXX_FLAGS}")
foreach(folder ${torch_folders})
  string(APPEND lockstep_torch_cflags " -I${folder}")
endforeach()
find_library(LOCKSTEP_C10 c10 HINTS ${TORCH_INSTALL_PREFIX}/lib NO_CACHE)
get_filename_component(folder ${LOCKSTEP_C10} DIRECTORY)
set(lockstep_torch_libs "-ltorch_cpu -lc10")
if(NOT folder IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
  string(PREPEND lockstep_torch_libs "-L${folder} -Wl,-rpath,${folder} ")
endif()
configure_file(cmake/lockstep.pc.in ${CMAKE_CURRENT_BINARY_DIR}/lockstep.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/lockstep.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT dev)

if(NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()

# --- Debian packages: cmake --workflow --preset deb
foreach(package lockstep lockstep-dev)
  string(REPLACE lockstep-dev dev component ${package})
  string(REPLACE lockstep runtime component ${component})
  install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${package} COMPONENT ${component} RENAME copyright)
  string(TOUPPER ${component} upper)
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${package})
endforeach()
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME lockstep)
set(CPACK_PACKAGE_VENDOR lockstep)
set(CPACK_PACKAGE_CONTACT "The lockstep maintainers")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_COMPONENTS_ALL runtime dev)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_RUNTIME_DESCRIPTION "Process groups over shared memory, Gloo and MPI, DistributedDataParallel,
data loading, optimizers and checkpoints for C++ programs, and the command
lockstep, which starts them. This package has what such a program needs in
order to run.")
set(CPACK_DEBIAN_DEV_DESCRIPTION "Headers, CMake package and pkg-config file: what a program needs in order to be
compiled with lockstep.")
# What the files need at run time is found in them. Training without OpenBLAS is many times slower.
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_BINARY_DIR})
set(CPACK_DEBIAN_RUNTIME_PACKAGE_RECOMMENDS "libopenblas0-pthread, openmpi-bin")
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "lockstep (= ${PROJECT_VERSION}-1), libtorch-dev, g++")
set(CPACK_DEBIAN_DEV_PACKAGE_SUGGESTS "cmake, ninja-build, pkg-config, libcli11-dev")
set(CPACK_PROJECT_CONFIG_FILE ${CMAKE_CURRENT_LIST_DIR}/CheckPackage.cmake)
set(CPACK_LOCKSTEP_TORCH "${Torch_DIR}")
include(CPack)
