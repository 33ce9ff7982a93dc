package agent

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// put makes a file have the content, unless it has it already. Readers see the old
// one or the new one. A file that is there keeps its mode and its owner, and a
// link stays; a new one gets the mode, and its directory is made.
//
// It makes the system calls that this takes and no more: between its start and its first
// answer a machine hears who it is, and in gVisor each call stops the thread for
// some 20 µs. By package os there are three times as many, for readiness, modes
// and roots.
func put(file, content string, mode fs.FileMode) error {
	if have, err := contentOf(file); err == nil && have == content {
		return nil
	}
	var st unix.Stat_t
	err := pathError("lstat", file, unix.Lstat(file, &st))
	there := err == nil
	switch {
	case there && st.Mode&unix.S_IFMT == unix.S_IFREG:
		mode = fs.FileMode(st.Mode) & fs.ModePerm
	case there:
		return os.WriteFile(file, []byte(content), mode)
	case errors.Is(err, fs.ErrNotExist):
		if err := os.MkdirAll(path.Dir(file), 0o755); err != nil {
			return err
		}
	default:
		return err
	}
	dir, err := open(unix.AT_FDCWD, path.Dir(file), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	// Always the same name: where an image's directory is changed, each name
	// that was ever in it leaves a trace in the layer of changes.
	const temporary = ".opendsec-new"
	temp, err := open(dir, temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		if err := remove(dir, temporary); err != nil {
			return err
		}
		temp, err = open(dir, temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	}
	if err != nil {
		return err
	}
	err = write(temp, file, content)
	if there {
		err = errors.Join(err, pathError("chown", file, unix.Fchown(temp, int(st.Uid), int(st.Gid))))
	}
	err = errors.Join(err, pathError("chmod", file, unix.Fchmod(temp, uint32(mode))), pathError("close", file, unix.Close(temp)))
	if err == nil {
		err = pathError("replace", file, unix.Renameat(dir, temporary, dir, path.Base(file)))
	}
	if err != nil {
		err = errors.Join(err, remove(dir, temporary))
	}
	return err
}

// contentOf returns a file's content.
func contentOf(name string) (string, error) {
	fd, err := open(unix.AT_FDCWD, name, unix.O_RDONLY, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	var content strings.Builder
	for buf := make([]byte, 8<<10); ; {
		n, err := again(func() (int, error) { return unix.Read(fd, buf) })
		if err != nil {
			return "", pathError("read", name, err)
		}
		if n == 0 {
			return content.String(), nil
		}
		content.Write(buf[:n])
	}
}

func write(fd int, name, content string) error {
	for content != "" {
		n, err := again(func() (int, error) { return unix.Write(fd, []byte(content)) })
		if err == nil && n == 0 {
			err = io.ErrShortWrite
		}
		if err != nil {
			return pathError("write", name, err)
		}
		content = content[n:]
	}
	return nil
}

// open opens a file by its name in a directory.
func open(dir int, name string, flags int, mode uint32) (int, error) {
	fd, err := again(func() (int, error) { return unix.Openat(dir, name, flags|unix.O_CLOEXEC, mode) })
	return fd, pathError("open", name, err)
}

// remove removes a file or an empty directory from a directory.
func remove(dir int, name string) error {
	err := unix.Unlinkat(dir, name, 0)
	if err == unix.EISDIR || err == unix.EPERM {
		err = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
	}
	return pathError("remove", name, err)
}

// again repeats a call that a signal interrupted.
func again[T any](call func() (T, error)) (T, error) {
	for {
		v, err := call()
		if err != unix.EINTR {
			return v, err
		}
	}
}

func pathError(op, name string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: name, Err: err}
}
