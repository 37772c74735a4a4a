// Importing megatrain._C loads this library. Its static registrations add kernels to the operators that megatrain/ops declares.
// The module itself has the compute capabilities that it was built for, and whether it found torch's current stream.
#include <Python.h>

#include "torch_side.h"

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  PyObject* created = PyModule_Create(&module);
  if (created == nullptr) return nullptr;
  if (PyModule_AddStringConstant(created, "architectures", MEGATRAIN_ARCHITECTURES) != 0 ||
      PyModule_AddIntConstant(created, "has_current_stream", aoti_torch_get_current_cuda_stream != nullptr) != 0) {
    Py_DECREF(created);
    return nullptr;
  }
  return created;
}
