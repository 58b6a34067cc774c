# The library's size, by architecture of the device code, against a budget. Included by the top
# level, it adds a test and the target binary_gemm_size; as a script it prints and compares:
#
#   cmake -DLIBRARIES=a.a,b.a -DAR=ar -DOBJCOPY=objcopy -DWORK=folder -P size_budget.cmake
#
# It needs no tool of CUDA. nvcc keeps all device code in the section .nv_fatbin of an object: for
# each translation unit a header of 16 bytes (magic, version, bytes of header and content), then an
# entry for each architecture's machine code or PTX, in the bytes that it takes in the file.

# The budget, in KiB, of what a user downloads and links. With CUDA 13.0 the kernels take 2570 to 4010
# for each architecture, 650 to 760 of it PTX, and 6520 for sm_90a, which has the 60 wgmma kernels, the
# rings and 9 kernels for a last slice that is a half (and no PTX); the CPU library takes 370. More than
# the budget is a template axis too many.
set(BINARY_GEMM_ARCHITECTURE_BUDGET 6656) # machine code and PTX of one architecture
set(BINARY_GEMM_HOST_BUDGET 1024)         # a library's file without device code

if(NOT CMAKE_SCRIPT_MODE_FILE)
  # Only what is shipped has a budget: debug information and sanitizers are larger. `ar` reads no
  # shared library.
  if(NOT CMAKE_BUILD_TYPE STREQUAL "Release" OR BUILD_SHARED_LIBS OR NOT CMAKE_AR
     OR NOT CMAKE_OBJCOPY)
    add_custom_target(binary_gemm_size COMMAND ${CMAKE_COMMAND} -E echo
                      "-- size: not measured, as this is no release of archives" VERBATIM)
    return()
  endif()
  set(binary_gemm_sized $<TARGET_FILE:binary_gemm_cpu>)
  if(TARGET binary_gemm_cuda)
    string(APPEND binary_gemm_sized ",$<TARGET_FILE:binary_gemm_cuda>")
  endif()
  set(binary_gemm_size_command ${CMAKE_COMMAND} -DLIBRARIES=${binary_gemm_sized} -DAR=${CMAKE_AR}
      -DOBJCOPY=${CMAKE_OBJCOPY} -DWORK=${PROJECT_BINARY_DIR}/size -P ${CMAKE_CURRENT_LIST_FILE})
  add_custom_target(binary_gemm_size COMMAND ${binary_gemm_size_command}
    DEPENDS binary_gemm_cpu $<TARGET_NAME_IF_EXISTS:binary_gemm_cuda> VERBATIM)
  if(BINARY_GEMM_BUILD_TESTS)
    add_test(NAME size_budget COMMAND ${binary_gemm_size_command})
    set_tests_properties(size_budget PROPERTIES LABELS "cpu;package" RESOURCE_LOCK size_budget)
  endif()
  return()
endif()

cmake_minimum_required(VERSION 3.25)

# Reads the little-endian integer of `bytes` bytes at `offset` of `file` into `result`.
function(read_integer result file offset bytes)
  file(READ ${file} hex OFFSET ${offset} LIMIT ${bytes} HEX)
  string(REGEX MATCHALL ".." hex "${hex}")
  list(REVERSE hex)
  list(JOIN hex "" hex)
  math(EXPR value "0x${hex}")
  set(${result} ${value} PARENT_SCOPE)
endfunction()

# Adds the entries of a .nv_fatbin section to code_<arch>, ptx_<arch> and the list `architectures`.
macro(add_section file)
  file(SIZE ${file} section_end)
  set(at 0)
  while(at LESS section_end)
    file(READ ${file} magic OFFSET ${at} LIMIT 4 HEX)
    if(NOT magic STREQUAL "50ed55ba")
      math(EXPR at "${at} + 8") # between the units of a section, which are aligned
      continue()
    endif()
    math(EXPR field "${at} + 6")
    read_integer(header ${file} ${field} 2)
    math(EXPR field "${at} + 8")
    read_integer(content ${file} ${field} 8)
    math(EXPR entry "${at} + ${header}")
    math(EXPR at "${entry} + ${content}")
    while(entry LESS at)
      read_integer(kind ${file} ${entry} 2) # 1: PTX, 2: machine code
      math(EXPR field "${entry} + 4")
      read_integer(header ${file} ${field} 4)
      math(EXPR field "${entry} + 8")
      read_integer(content ${file} ${field} 8)
      math(EXPR field "${entry} + 28")
      read_integer(architecture ${file} ${field} 4)
      if(header EQUAL 0 OR kind GREATER 16)
        message(FATAL_ERROR "${file}: no entry of a fat binary at ${entry}")
      endif()
      if(NOT architecture IN_LIST architectures)
        list(APPEND architectures ${architecture})
        set(code_${architecture} 0)
        set(ptx_${architecture} 0)
      endif()
      math(EXPR content "${header} + ${content}")
      if(kind EQUAL 1)
        math(EXPR ptx_${architecture} "${ptx_${architecture}} + ${content}")
      else()
        math(EXPR code_${architecture} "${code_${architecture}} + ${content}")
      endif()
      math(EXPR device "${device} + ${content}")
      math(EXPR entry "${entry} + ${content}")
    endwhile()
  endwhile()
endmacro()

set(over "")
# say(WHAT BYTES BUDGET): prints a line and remembers what is over its budget.
macro(say what bytes budget)
  math(EXPR kib "(${bytes} + 1023) / 1024")
  message(STATUS "size: ${what} ${kib} KiB of ${budget}")
  if(${kib} GREATER ${budget})
    list(APPEND over "${what}")
  endif()
endmacro()

string(REPLACE "," ";" LIBRARIES "${LIBRARIES}")
foreach(library IN LISTS LIBRARIES)
  file(REMOVE_RECURSE ${WORK})
  file(MAKE_DIRECTORY ${WORK})
  execute_process(COMMAND ${AR} x ${library} WORKING_DIRECTORY ${WORK} COMMAND_ERROR_IS_FATAL ANY)
  file(GLOB objects ${WORK}/*.o)
  if(NOT objects)
    message(FATAL_ERROR "${library} has no objects")
  endif()
  set(architectures "")
  set(device 0)
  foreach(object IN LISTS objects)
    # An object without the section gives an empty file.
    execute_process(COMMAND ${OBJCOPY} -O binary --only-section=.nv_fatbin ${object} ${WORK}/section
                    ERROR_QUIET)
    if(EXISTS ${WORK}/section)
      add_section(${WORK}/section)
      file(REMOVE ${WORK}/section)
    endif()
  endforeach()
  get_filename_component(name ${library} NAME)
  file(SIZE ${library} bytes)
  math(EXPR host "${bytes} - ${device}")
  say("${name}, host code" ${host} ${BINARY_GEMM_HOST_BUDGET})
  list(SORT architectures COMPARE NATURAL)
  foreach(architecture IN LISTS architectures)
    math(EXPR both "${code_${architecture}} + ${ptx_${architecture}}")
    math(EXPR ptx "(${ptx_${architecture}} + 1023) / 1024")
    say("${name}, sm_${architecture} (PTX: ${ptx})" ${both} ${BINARY_GEMM_ARCHITECTURE_BUDGET})
  endforeach()
  math(EXPR kib "(${bytes} + 1023) / 1024")
  message(STATUS "size: ${name}, all ${kib} KiB")
endforeach()
file(REMOVE_RECURSE ${WORK})
if(over)
  list(JOIN over "; " over)
  message(FATAL_ERROR "Over the budget that cmake/size_budget.cmake states: ${over}")
endif()
