/* One read of a socket with both of its stamps: when the kernel had the bytes, and when we do.

The same as `_in_python` of `transport.py`, which runs where this was not built. It holds the interpreter's lock
throughout: nothing here blocks, and a lock given away may come back late. Limited API. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum { MOST_READ = 1 << 16 };

static char buffer[MOST_READ]; /* under the interpreter's lock, and free again before Python code runs */

static long long nanoseconds(const struct timespec *at) { return (long long)at->tv_sec * 1000000000 + at->tv_nsec; }

/* receive(fd, received, lost) calls `received(data, ours, the kernel's)`, or at the end, or where it failed,
   `lost(error or None)`. */
static PyObject *receive(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "receive(fd, received, lost)");
    return NULL;
  }
  int fd = (int)PyLong_AsLong(arguments[0]);
  if (fd == -1 && PyErr_Occurred()) return NULL;
  PyObject *received = arguments[1], *lost = arguments[2];
  union {
    char room[128];
    struct cmsghdr aligned;
  } control;
  struct iovec into = {buffer, sizeof buffer};
  struct msghdr message = {.msg_iov = &into, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
  struct timespec now, arrived = {0, 0};
  ssize_t size = recvmsg(fd, &message, MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) Py_RETURN_NONE;
  if (size < 0) {
    PyObject *error = PyObject_CallFunction(PyExc_OSError, "is", errno, strerror(errno));
    PyObject *heard = error == NULL ? NULL : PyObject_CallFunctionObjArgs(lost, error, NULL);
    Py_XDECREF(error);
    return heard;
  }
  if (size == 0) return PyObject_CallFunctionObjArgs(lost, Py_None, NULL);
  clock_gettime(CLOCK_MONOTONIC, &now);
  for (struct cmsghdr *part = CMSG_FIRSTHDR(&message); part != NULL; part = CMSG_NXTHDR(&message, part))
    if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_TIMESTAMPNS)
      memcpy(&arrived, CMSG_DATA(part), sizeof arrived);
  PyObject *done = NULL, *data = PyBytes_FromStringAndSize(buffer, size);
  PyObject *ours = PyLong_FromLongLong(nanoseconds(&now)), *kernels = PyLong_FromLongLong(nanoseconds(&arrived));
  if (data != NULL && ours != NULL && kernels != NULL)
    done = PyObject_CallFunctionObjArgs(received, data, ours, kernels, NULL);
  Py_XDECREF(data);
  Py_XDECREF(ours);
  Py_XDECREF(kernels);
  return done;
}

static PyMethodDef methods[] = {
    {"receive", (PyCFunction)(void (*)(void))receive, METH_FASTCALL, "Read once what is there."}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_receive", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__receive(void) { return PyModule_Create(&module); }
