// Importing megatrain._C loads this library, whose static registrations add kernels to the operators that
// megatrain/ops declares. The module itself only knows for which compute capabilities it was built.
#include <Python.h>

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  PyObject* created = PyModule_Create(&module);
  if (created != nullptr && PyModule_AddStringConstant(created, "architectures", MEGATRAIN_ARCHITECTURES) != 0) {
    Py_DECREF(created);
    return nullptr;
  }
  return created;
}
