/* Values of a list that JSON has types for, many of them looked at by one call.
 *
 * This one is about objects of Python: it is called by its address with the GIL held, changes
 * nothing and keeps nothing. Where there is no GIL (free-threaded builds) it says OTHER.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum { OTHER = 0, LEAVES = 1, JSON = 2 };

static int look_at(PyObject *value)
{
    PyTypeObject *kind = Py_TYPE(value);
    if (kind == &PyFloat_Type) {
        double number = PyFloat_AS_DOUBLE(value);
        return number - number == 0 ? JSON : LEAVES; /* not of inf and nan */
    }
    if (kind == &PyLong_Type) {
        int overflow;
        (void)PyLong_AsLongLongAndOverflow(value, &overflow);
        return overflow ? LEAVES : JSON;
    }
    if (kind == &PyUnicode_Type)
        return PyUnicode_IS_COMPACT_ASCII(value) ? JSON : LEAVES;
    return kind == &PyBool_Type || value == Py_None ? JSON : OTHER;
}

/* JSON: all are, as they are. LEAVES: all are numbers, texts, None, and one of them is not finite,
 * of more than 64 bits, or not ASCII. OTHER: something else is among them. -1 with an error set. */
int hpstore_plain_values_1(PyObject *values)
{
#ifdef Py_GIL_DISABLED
    (void)values, (void)look_at;
    return OTHER;
#else
    PyObject *all = PySequence_Fast(values, "values are iterable");
    if (all == NULL)
        return -1;
    int found = JSON;
    PyObject **each = PySequence_Fast_ITEMS(all);
    Py_ssize_t count = PySequence_Fast_GET_SIZE(all);
    for (Py_ssize_t i = 0; i < count && found != OTHER; i++) {
        int said = look_at(each[i]);
        found = said < found ? said : found;
    }
    Py_DECREF(all);
    return found;
#endif
}
