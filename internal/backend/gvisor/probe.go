package gvisor

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
)

// Probe runs a machine whose process 1 is a program of two instructions, and
// looks whether the program ended as it should.
func (b *Backend) Probe(ctx context.Context) (backend.Features, error) {
	b.sweepOnce.Do(b.sweep)
	if err := b.probe(ctx); err != nil {
		return backend.Features{}, fmt.Errorf("gVisor does not work here: %w", err)
	}
	return backend.Features{Pause: true, SnapshotMemory: true, SnapshotFiles: true}, nil
}

// probePrefix begins the name of a probe's directory in StateDir.
const probePrefix = "probe-"

func (b *Backend) probe(ctx context.Context) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("it needs root")
	}
	if err := unix.Access(b.opts.SentryPath, unix.X_OK); err != nil {
		return fmt.Errorf("the sentry %s cannot be run: %w", b.opts.SentryPath, err)
	}
	if err := os.MkdirAll(b.opts.StateDir, 0o700); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(b.opts.StateDir, probePrefix)
	if err != nil {
		return err
	}
	b.know(filepath.Base(dir), "") // no leftover
	defer func() {
		err = errors.Join(err, os.RemoveAll(dir))
		b.mu.Lock()
		delete(b.live, filepath.Base(dir))
		b.mu.Unlock()
	}()
	image, err := probeImage(ctx, dir)
	if err != nil {
		return err
	}
	s, err := b.boot(ctx, probeKey(image), beginning{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.discard(s)) }()
	// The program may end before all is set for it; its status tells.
	serr := s.start(ctx, probePIDs)
	if serr != nil {
		if err := s.stop(); err != nil {
			return errors.Join(serr, err)
		}
	}
	if err := s.wait(ctx); err != nil {
		return errors.Join(err, serr)
	}
	if s.status == nil || !s.status.Exited() || s.status.ExitStatus() != probeStatus {
		return errors.Join(fmt.Errorf("a test machine did not run its program: %s", s.exit().Detail), serr)
	}
	return nil
}

const probePIDs = 16

// probeKey describes the machine of an image from probeImage.
func probeKey(image string) key {
	return key{rootfs: image, agent: image, cpus: 1, memoryMB: 64, diskMB: 1, pids: probePIDs}
}

// probeImage makes an image of the probe's program only.
func probeImage(ctx context.Context, dir string) (string, error) {
	program, err := probeProgram()
	if err != nil {
		return "", err
	}
	tree := filepath.Join(dir, "tree")
	if err := os.Mkdir(tree, 0o755); err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(tree, "agent"), program, 0o755); err != nil {
		return "", err
	}
	image := filepath.Join(dir, "image.erofs")
	out, err := exec.CommandContext(ctx, "mkfs.erofs", "-E", "noinline_data", image, tree).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return "", errors.New("mkfs.erofs is not installed: apt-get install erofs-utils")
	}
	if err != nil {
		return "", fmt.Errorf("mkfs.erofs: %w: %s", err, bytes.TrimSpace(out))
	}
	return image, nil
}

// probeStatus is the status with which the probe's program ends, one that
// nothing gives by accident.
const probeStatus = 42

// exitCode is machine code for exit(probeStatus).
var exitCode = map[string]struct {
	machine elf.Machine
	code    []byte
}{
	"amd64": {elf.EM_X86_64, []byte{
		0xbf, probeStatus, 0, 0, 0, // mov edi, status
		0xb8, 60, 0, 0, 0, // mov eax, exit
		0x0f, 0x05, // syscall
	}},
	"arm64": {elf.EM_AARCH64, binary.LittleEndian.AppendUint32(
		binary.LittleEndian.AppendUint32(
			binary.LittleEndian.AppendUint32(nil,
				0xd2800000|probeStatus<<5), // mov x0, status
			0xd2800000|93<<5|8), // mov x8, exit
		0xd4000001), // svc
	},
}

// probeProgram returns a static program that ends with probeStatus.
func probeProgram() ([]byte, error) {
	exit, ok := exitCode[runtime.GOARCH]
	if !ok {
		return nil, fmt.Errorf("gVisor does not run on %s", runtime.GOARCH)
	}
	const base = 0x400000
	const headers = 64 + 56 // of an ELF file with one segment
	size := uint64(headers + len(exit.code))
	var b bytes.Buffer
	header := elf.Header64{
		Type: uint16(elf.ET_EXEC), Machine: uint16(exit.machine), Version: uint32(elf.EV_CURRENT),
		Entry: base + headers, Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1, Shentsize: 64,
	}
	copy(header.Ident[:], elf.ELFMAG)
	header.Ident[elf.EI_CLASS] = byte(elf.ELFCLASS64)
	header.Ident[elf.EI_DATA] = byte(elf.ELFDATA2LSB)
	header.Ident[elf.EI_VERSION] = byte(elf.EV_CURRENT)
	segment := elf.Prog64{
		Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X),
		Vaddr: base, Paddr: base, Filesz: size, Memsz: size, Align: 0x1000,
	}
	for _, part := range []any{header, segment, exit.code} {
		if err := binary.Write(&b, binary.LittleEndian, part); err != nil {
			return nil, fmt.Errorf("make the probe's program: %w", err)
		}
	}
	return b.Bytes(), nil
}
