/* What becomes of a process whose mapped file loses its bytes: somebody has shortened it in place,
 * and a page of the map has nothing behind it. Left alone, that is a SIGBUS and a death without a
 * word. */
#ifndef CYENGINE_LOST_FILE_H_
#define CYENGINE_LOST_FILE_H_

#ifdef __cplusplus
extern "C" {
#endif

/* From now on such a fault writes one line that names the file to `fd` and ends the process with
 * `exit_status`, in whichever thread it comes. Any other SIGBUS goes to whoever had the signal
 * before. For the whole process: for programs, not for libraries. Returns 0, or an errno. */
int exit_on_lost_file(int fd, int exit_status);

#ifdef __cplusplus
}
#endif

#endif
