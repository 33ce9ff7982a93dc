package image

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image/imagetest"
)

// blobs of the parts of an image.
type parts struct{ manifest, config, layer string }

func partsOf(t *testing.T, img v1.Image) parts {
	t.Helper()
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return parts{digest.String(), m.Config.Digest.String(), m.Layers[0].Digest.String()}
}

func blobPath(dir, digest string) string {
	return filepath.Join(dir, "blobs", strings.Replace(digest, ":", "/", 1))
}

// change rewrites a file.
func change(t *testing.T, file string, f func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, f(b), 0o600); err != nil {
		t.Fatal(err)
	}
}

func flip(b []byte) []byte {
	b = bytes.Clone(b)
	b[len(b)*2/3] ^= 1
	return b
}

func half(b []byte) []byte { return b[:len(b)/2] }

// lyingImage is an image whose configuration names a wrong digest of the
// uncompressed layer.
func lyingImage(t *testing.T) v1.Image {
	img := simpleImage(t, "x")
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.RootFS.DiffIDs[0].Hex = strings.Repeat("ab", 32)
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	return img
}

// Each damage is told by the digest of what is damaged, and leaves nothing.
func TestDamaged(t *testing.T) {
	random := strings.Repeat("some content that does not compress to nothing ", 3000)
	img := imagetest.Image(t, [][]byte{imagetest.Tar(t, imagetest.File("f", random))})
	plain := imagetest.Plain(t, [][]byte{imagetest.Tar(t, imagetest.File("f", random))})
	p, pp := partsOf(t, img), partsOf(t, plain)
	oci := func(img v1.Image, digest string, f func([]byte) []byte) func(*testing.T) string {
		return func(t *testing.T) string {
			dir := writeLayout(t, img)
			if digest != "" {
				change(t, blobPath(dir, digest), f)
			}
			return "oci:" + dir
		}
	}
	docker := func(f func([]byte) []byte) func(*testing.T) string {
		return func(t *testing.T) string {
			file := dockerArchive(t, map[string]v1.Image{"x:v": plain})
			change(t, file, f)
			return "docker-archive:" + file
		}
	}
	tests := map[string]struct {
		source func(*testing.T) string
		want   string // in the error
	}{
		"layer":           {oci(img, p.layer, flip), p.layer},
		"layer truncated": {oci(img, p.layer, half), p.layer},
		"layer longer":    {oci(img, p.layer, func(b []byte) []byte { return append(b, "more"...) }), p.layer},
		"layer missing": {func(t *testing.T) string {
			d := writeLayout(t, img)
			_ = os.Remove(blobPath(d, p.layer))
			return "oci:" + d
		}, p.layer},
		"plain layer":           {oci(plain, pp.layer, flip), pp.layer},
		"plain layer truncated": {oci(plain, pp.layer, half), pp.layer},
		"manifest":              {oci(img, p.manifest, func(b []byte) []byte { return append(b, ' ') }), p.manifest},
		"configuration":         {oci(img, p.config, func(b []byte) []byte { return bytes.Replace(b, []byte("app"), []byte("bad"), 1) }), p.config},
		"uncompressed digest":   {oci(lyingImage(t), "", nil), strings.Repeat("ab", 32)},
		"docker layer":          {docker(func(b []byte) []byte { return bytes.Replace(b, []byte("some content"), []byte("bad! content"), 1) }), "the digest of the uncompressed layer"},
		"docker truncated":      {docker(half), "truncated"},
		"docker configuration":  {docker(func(b []byte) []byte { return bytes.Replace(b, []byte(`"app"`), []byte(`"bad"`), 1) }), "configuration"},
		"no archive":            {docker(func([]byte) []byte { return []byte(random) }), "archive"},
		"empty":                 {docker(func([]byte) []byte { return nil }), "manifest.json"},
		"other architecture":    {func(t *testing.T) string { return "oci:" + writeLayout(t, withArch(t, img, "arm64")) }, "arm64"},
		"no such file":          {func(*testing.T) string { return "oci:/nonexistent/x:tag" }, "/nonexistent/x"},
		"no such tag":           {func(t *testing.T) string { return "oci:" + writeLayout(t, img) + ":none" }, "none"},
		"two images": {func(t *testing.T) string {
			return "docker-archive:" + dockerArchive(t, map[string]v1.Image{"a:v": img, "b:v": plain})
		}, "a:v"},
		"no layout": {func(t *testing.T) string { return "oci:" + t.TempDir() }, "index.json"},
		"nonsense":  {func(*testing.T) string { return "UPPER CASE" }, "UPPER CASE"},
		"nothing":   {func(*testing.T) string { return "" }, "empty"},
	}
	s := openStore(t, t.TempDir())
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := s.Import(t.Context(), ImportOptions{Source: test.source(t)}, nil)
			if !fault.Is(err, fault.InvalidArgument) || fault.Of(err).Field != "source" {
				t.Fatalf("Import = %v, want an InvalidArgument for source", err)
			}
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("Import = %v, want it to name %q", err, test.want)
			}
			noStaging(t, s)
			if all, err := s.List(); err != nil || len(all) != 0 {
				t.Errorf("the store has %v, %v", all, err)
			}
		})
	}
}

var layerPath = regexp.MustCompile(`/blobs/(sha256:[0-9a-f]{64})$`)

// A registry's blobs are checked too, and a broken download is tried again.
func TestDamagedDownload(t *testing.T) {
	img := simpleImage(t, strings.Repeat("content", 10000))
	p := partsOf(t, img)
	for name, test := range map[string]struct {
		alter func(b []byte, n int) []byte // of the n-th download of the layer
		kind  fault.Kind                   // "" for success
	}{
		"sound":             {func(b []byte, _ int) []byte { return b }, ""},
		"changed":           {func(b []byte, _ int) []byte { return flip(b) }, fault.InvalidArgument},
		"cut off once":      {func(b []byte, n int) []byte { return b[:len(b)*min(n, 2)/2] }, ""},
		"cut off each time": {func(b []byte, _ int) []byte { return half(b) }, fault.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			downloads := 0
			host, _ := newRegistry(t, func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					m := layerPath.FindStringSubmatch(r.URL.Path)
					if r.Method != http.MethodGet || m == nil || m[1] != p.layer {
						next.ServeHTTP(w, r)
						return
					}
					rec := httptest.NewRecorder()
					next.ServeHTTP(rec, r)
					w.Header().Set("Content-Length", rec.Header().Get("Content-Length"))
					downloads++
					_, _ = w.Write(test.alter(rec.Body.Bytes(), downloads))
				})
			})
			push(t, host+"/x:v1", img)
			s := openStore(t, t.TempDir())
			a, err := s.Import(t.Context(), ImportOptions{Source: host + "/x:v1"}, nil)
			if test.kind == "" && (err != nil || a.Digest != p.manifest) || test.kind != "" && !fault.Is(err, test.kind) {
				t.Errorf("Import = %v, %v after %d downloads", a, err, downloads)
			}
			if test.kind != "" && !strings.Contains(err.Error(), p.layer) {
				t.Errorf("Import = %v, want it to name %s", err, p.layer)
			}
			noStaging(t, s)
		})
	}
}

// A full disk is told as such, before or while it happens, and nothing is left.
func TestDiskFull(t *testing.T) {
	img := simpleImage(t, strings.Repeat("0123456789abcdef", 1<<20))
	src := "oci:" + writeLayout(t, img)
	for name, reserve := range map[string]int64{"while unpacking": 0, "by reserve": 1 << 30} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := unix.Unmount(dir, 0); err != nil {
					t.Error(err)
				}
			}()
			s, err := Open(slog.New(slog.DiscardHandler), dir)
			if err != nil {
				t.Fatal(err)
			}
			s.reserve = reserve
			_, err = s.Import(t.Context(), ImportOptions{Source: src}, nil)
			if !fault.Is(err, fault.Capacity) {
				t.Errorf("Import = %v, want a Capacity fault", err)
			}
			noStaging(t, s)
			if err := s.Close(true); err != nil {
				t.Error(err)
			}
		})
	}
}

// stalled is a registry whose layer stops in the middle; begun is closed when
// that happens.
func stalled(t *testing.T) (ref string, begun chan struct{}) {
	img := simpleImage(t, strings.Repeat("content", 10000))
	p := partsOf(t, img)
	begun = make(chan struct{})
	done := make(chan struct{})
	host, _ := newRegistry(t, func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, p.layer) {
				next.ServeHTTP(w, r)
				return
			}
			w.Header().Set("Content-Length", "100000")
			_, _ = io.WriteString(w, "beginning")
			_ = http.NewResponseController(w).Flush()
			close(begun)
			select {
			case <-r.Context().Done():
			case <-done:
			}
		})
	})
	t.Cleanup(func() { close(done) })
	push(t, host+"/x:v1", img)
	return host + "/x:v1", begun
}

func TestCanceled(t *testing.T) {
	ref, begun := stalled(t)
	s := openStore(t, t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-begun
		cancel()
	}()
	if _, err := s.Import(ctx, ImportOptions{Source: ref}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("Import = %v, want %v", err, context.Canceled)
	}
	noStaging(t, s)
}

// The environment of the program that TestKilled kills.
const (
	envDir = "OPENDSEC_TEST_STORE"
	envRef = "OPENDSEC_TEST_REF"
)

// TestImportHere is what TestKilled runs in a process of its own.
func TestImportHere(t *testing.T) {
	if os.Getenv(envDir) == "" {
		return // not that process
	}
	s, err := Open(slog.New(slog.DiscardHandler), os.Getenv(envDir))
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Import(t.Context(), ImportOptions{Source: os.Getenv(envRef)}, nil)
	t.Fatalf("Import = %v, want to be killed", err)
}

func TestKilled(t *testing.T) {
	ref, begun := stalled(t)
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^TestImportHere$")
	cmd.Env = append(os.Environ(), envDir+"="+dir, envRef+"="+ref)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-begun
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if left, err := os.ReadDir(filepath.Join(dir, stagingName)); err != nil || len(left) == 0 {
		t.Errorf("staging has %v, %v; want what the killed import left", left, err)
	}
	// A mount below it, as a killed build may leave, is not walked into.
	kept := t.TempDir()
	if err := os.WriteFile(filepath.Join(kept, "precious"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	mountpoint := filepath.Join(dir, stagingName, "killed", "dev")
	if err := os.MkdirAll(mountpoint, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(kept, mountpoint, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, dir)
	noStaging(t, s)
	if _, err := os.Stat(filepath.Join(kept, "precious")); err != nil {
		t.Errorf("the removal went through a mount: %v", err)
	}
}

// unpackedBy returns the tree that umoci makes of an image.
func unpackedBy(t *testing.T, dir string) string {
	t.Helper()
	umoci, err := exec.LookPath("umoci")
	if err != nil {
		t.Fatalf("umoci is needed to compare with: %v", err)
	}
	bundle := filepath.Join(t.TempDir(), "bundle")
	if out, err := exec.Command(umoci, "unpack", "--image", dir+":v1", bundle).CombinedOutput(); err != nil {
		t.Fatalf("umoci unpack: %v: %s", err, out)
	}
	return filepath.Join(bundle, "rootfs")
}

// Another implementation makes the same tree of the same layers.
func TestAgreesWithUmoci(t *testing.T) {
	dir := writeLayout(t, imagetest.Image(t, richLayers(t)))
	change(t, filepath.Join(dir, "index.json"), func(b []byte) []byte {
		var index struct {
			SchemaVersion int              `json:"schemaVersion"`
			Manifests     []map[string]any `json:"manifests"`
		}
		if err := json.Unmarshal(b, &index); err != nil {
			t.Fatal(err)
		}
		index.Manifests[0]["annotations"] = map[string]string{"org.opencontainers.image.ref.name": "v1"}
		b, err := json.Marshal(index)
		if err != nil {
			t.Fatal(err)
		}
		return b
	})
	s := openStore(t, t.TempDir())
	a, err := s.Import(t.Context(), ImportOptions{Source: "oci:" + dir + ":v1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	root, _, err := s.Acquire(t.Context(), a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Release(a.Digest)
	want, got := imagetest.Tree(t, unpackedBy(t, dir)), imagetest.Tree(t, root.Tree)
	for name := range got { // it gives unnamed parents and the root the time of today
		if name == "." || strings.HasSuffix(name, "long") {
			delete(want, name)
			delete(got, name)
		}
	}
	equalTrees(t, "umoci and we", want, got)
}
