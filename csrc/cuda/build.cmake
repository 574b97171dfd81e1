# The CUDA kernels, etserve/libetserve_cuda.so: a plain C ABI, no torch and no driver at build or load time.
#   ETSERVE_CUDA=AUTO  built where nvcc is found and the Python environment's torch is a CUDA build; else it says why not
#                ON    built, or the configuration fails; OFF: left out
set(ETSERVE_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO, ON or OFF")
if(NOT ETSERVE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "ETSERVE_CUDA must be AUTO, ON or OFF, not ${ETSERVE_CUDA}")
endif()

set(etserve_no_cuda "")
if(ETSERVE_CUDA STREQUAL "OFF")
  set(etserve_no_cuda "ETSERVE_CUDA=OFF")
else()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE etserve_nvcc ERROR_QUIET)
    string(REGEX MATCH "release ([0-9.]+)" etserve_nvcc "${etserve_nvcc}")
    set(etserve_nvcc "${CMAKE_MATCH_1}")
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    set(etserve_no_cuda "nvcc was not found")
  elseif(NOT etserve_nvcc VERSION_GREATER_EQUAL 12.8)
    set(etserve_no_cuda "the kernels need nvcc 12.8, ${CMAKE_CUDA_COMPILER} is '${etserve_nvcc}'")
  elseif(ETSERVE_CUDA STREQUAL "AUTO")
    # -I: the environment's own packages, also from within an isolated build. torch itself is not imported.
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -I -c
              "import importlib.util, pathlib, runpy; spec = importlib.util.find_spec('torch'); \
print((runpy.run_path(str(pathlib.Path(spec.origin).with_name('version.py'))).get('cuda') if spec else None) or '', end='')"
      OUTPUT_VARIABLE etserve_torch_cuda RESULT_VARIABLE etserve_torch_code ERROR_QUIET)
    if(NOT etserve_torch_code EQUAL 0 OR NOT etserve_torch_cuda)
      set(etserve_no_cuda "no CUDA build of torch in ${Python_EXECUTABLE}'s environment")
    endif()
  endif()
endif()

if(etserve_no_cuda)
  if(ETSERVE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "etserve: ETSERVE_CUDA=ON, but ${etserve_no_cuda}")
  endif()
  message(STATUS "etserve: going on without the CUDA kernels: ${etserve_no_cuda}")
else()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100-real 120-real)
  endif()
  enable_language(CUDA)
  message(STATUS "etserve: building the CUDA kernels with nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
  file(GLOB ETSERVE_CUDA_SOURCES CONFIGURE_DEPENDS csrc/cuda/*.cu)
  add_library(etserve_cuda SHARED ${ETSERVE_CUDA_SOURCES})
  target_include_directories(etserve_cuda PRIVATE csrc/include)
  set_target_properties(etserve_cuda PROPERTIES CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON
                        CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)
  install(TARGETS etserve_cuda LIBRARY DESTINATION etserve)
endif()
