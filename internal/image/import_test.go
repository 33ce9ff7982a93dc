package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"io"
	"log"

	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/compression"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image/imagetest"
)

var emptyIndex = empty.Index

func equalTrees(t *testing.T, what string, want, got map[string]string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// richLayers are layers with something of everything.
func richLayers(t testing.TB) [][]byte {
	i := imagetest.File
	return [][]byte{
		imagetest.Tar(t,
			imagetest.Dir("./"), imagetest.Dir("etc/"), i("etc/passwd", "app:x:1:1::/:/bin/sh\n"), imagetest.Dir("usr/"), imagetest.Dir("usr/bin/"),
			i("usr/bin/tool", strings.Repeat("binary", 5000)).With(func(h *tar.Header) { h.Mode, h.Uid, h.Gid = 0o4755, 7, 8 }),
			imagetest.Link("usr/bin/same", "usr/bin/tool"), imagetest.Symlink("bin", "usr/bin"), imagetest.Symlink("abs", "/etc"),
			imagetest.Dir("gone/"), i("gone/a", "a"), imagetest.Dir("opaque/"), i("opaque/a", "a"),
			i("capable", "").Xattr("security.capability", "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00").Xattr("user.note", "n"),
			imagetest.Device(tar.TypeFifo, "pipe", 0, 0), imagetest.Device(tar.TypeChar, "null", 1, 3), i("dir-to-be", ""), imagetest.Dir("file-to-be/"),
			i("file-to-be/x", ""), i(strings.Repeat("long/", 60)+"f", "deep"),
		),
		imagetest.Tar(t,
			imagetest.Dir("etc/"), i("etc/group", "root").With(func(h *tar.Header) { h.ModTime = time.Unix(1_500_000_000, 0) }), i(".wh.gone", ""),
			imagetest.Dir("opaque/"), i("opaque/.wh..wh..opq", ""), i("opaque/b", "b"), imagetest.Dir("usr/"), imagetest.Dir("usr/bin/"),
			i("usr/bin/.wh.tool", ""), imagetest.Link("other", "usr/bin/same"), imagetest.Dir("dir-to-be/"), i("dir-to-be/y", ""), i("file-to-be", "now"),
		),
		imagetest.Tar(t),
	}
}

// richTree is what umoci makes of richLayers; TestAgreesWithUmoci looks.
func richTree(t testing.TB) map[string]string {
	const f, d = "file 0644 0:0 @1600000000 ", "dir 0755 0:0 @1600000000"
	tree := map[string]string{
		".": d, "etc": d, "etc/passwd": f + `"app:x:1:1::/:/bin/sh\n"`, "etc/group": `file 0644 0:0 @1500000000 "root"`, "usr": d, "usr/bin": d,
		"bin": "link 0777 0:0 @1600000000 -> usr/bin", "abs": "link 0777 0:0 @1600000000 -> /etc", "opaque": d, "opaque/b": f + `"b"`,
		"capable": f + `"" security.capability="\x01\x00\x00\x02\x00 \x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" user.note="n"`,
		"pipe":    "fifo 0600 0:0 @1600000000", "null": "char 0600 0:0 @1600000000 1:3",
		"dir-to-be": d, "dir-to-be/y": f + `""`, "file-to-be": f + `"now"`,
	}
	same := fmt.Sprintf("file 4755 7:8 @1600000000 30000 bytes %x = other, usr/bin/same", sha256.Sum256([]byte(strings.Repeat("binary", 5000))))
	tree["usr/bin/same"], tree["other"] = same, same
	at := "long"
	for range 60 {
		tree[at] = "dir 0755 0:0 @0"
		at += "/long"
	}
	tree[strings.Repeat("long/", 60)+"f"] = f + `"deep"`
	return tree
}

// checkRich imports a rich image, mounts it and compares its tree.
func checkRich(t *testing.T, s *Store, o ImportOptions, want v1.Image) {
	t.Helper()
	var steps []string
	a, err := s.Import(t.Context(), o, func(p Progress) {
		if len(steps) == 0 || steps[len(steps)-1] != p.Step {
			steps = append(steps, p.Step)
		}
		if p.Done > p.Total {
			t.Errorf("progress %+v", p)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	digest, err := want.Digest()
	if strings.HasPrefix(o.Source, "docker-archive:") {
		digest, err = want.ConfigName()
	}
	if err != nil || a.Digest != digest.String() {
		t.Errorf("the digest is %s, want %s, %v", a.Digest, digest, err)
	}
	config := Config{Env: []string{"A=1"}, User: "app", Workdir: "/srv", Cmd: []string{"run"}, Labels: map[string]string{"l": "v"}}
	if diff := cmp.Diff(config, a.Config); diff != "" || a.Architecture != "amd64" || a.Source != o.Source || a.Size == 0 {
		t.Errorf("artifact %+v; config (-want +got):\n%s", a, diff)
	}
	if steps[len(steps)-1] != "done" || len(steps) < 3 || len(steps) > 4 {
		t.Errorf("steps were %v", steps)
	}
	root, _, err := s.Acquire(t.Context(), a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Release(a.Digest)
	equalTrees(t, o.Source, richTree(t), imagetest.Tree(t, root.Tree))
}

func TestImportFiles(t *testing.T) {
	img := imagetest.Image(t, richLayers(t))
	other := simpleImage(t, "other")
	oci := writeLayout(t, img)
	ociTar := tarOf(t, oci)
	docker := dockerArchive(t, map[string]v1.Image{"example.org/rich:v1": img})
	two := dockerArchive(t, map[string]v1.Image{"rich:v1": img, "other:v2": other})
	nested := writeLayout(t)
	l := layout.Path(nested)
	named := layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "v1"})
	if err := l.AppendIndex(nestedIndex(t, img, other), named); err != nil {
		t.Fatal(err)
	}
	if err := l.AppendImage(other, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "v2"})); err != nil {
		t.Fatal(err)
	}
	colon := filepath.Join(t.TempDir(), "with:colon")
	if err := os.Rename(tarOf(t, oci), colon); err != nil {
		t.Fatal(err)
	}
	for _, src := range []string{
		"oci:" + oci, "oci-archive:" + ociTar, "docker-archive:" + docker, "docker-archive:" + docker + ":v1", "docker-archive:" + docker + ":example.org/rich:v1",
		"docker-archive:" + two + ":docker.io/library/rich:v1", "docker-archive:" + compressed(t, docker), "oci-archive:" + compressed(t, ociTar),
		"oci:" + nested + ":v1", "oci-archive:" + colon,
	} {
		t.Run(strings.SplitN(src, ":", 2)[0], func(t *testing.T) {
			checkRich(t, openStore(t, t.TempDir()), ImportOptions{Source: src}, img)
		})
	}
}

// Equal layers give equal files, whatever they came in.
func TestImportReproducible(t *testing.T) {
	img := imagetest.Image(t, richLayers(t))
	var sums []string
	for _, src := range []string{"oci:" + writeLayout(t, imagetest.Plain(t, richLayers(t))), "docker-archive:" + dockerArchive(t, map[string]v1.Image{"a:b": img})} {
		s := openStore(t, t.TempDir())
		a, err := s.Import(t.Context(), ImportOptions{Source: src}, nil)
		if err != nil {
			t.Fatal(err)
		}
		dir, err := s.path(a.Digest)
		if err != nil {
			t.Fatal(err)
		}
		sum, err := fileDigest(filepath.Join(dir, rootfsName))
		if err != nil {
			t.Fatal(err)
		}
		sums = append(sums, sum)
	}
	if sums[0] != sums[1] {
		t.Errorf("the files differ: %v", sums)
	}
}

func TestImportCompressions(t *testing.T) {
	for name, img := range map[string]v1.Image{
		"gzip": imagetest.Image(t, richLayers(t)),
		"zstd": imagetest.Image(t, richLayers(t), tarball.WithCompression(compression.ZStd)),
		"none": imagetest.Plain(t, richLayers(t)),
	} {
		t.Run(name, func(t *testing.T) {
			checkRich(t, openStore(t, t.TempDir()), ImportOptions{Source: "oci:" + writeLayout(t, img)}, img)
		})
	}
}

// nestedIndex is an index with an attestation, another platform, and an index
// with the image in it, some without a platform.
func nestedIndex(t *testing.T, img, other v1.Image) v1.ImageIndex {
	t.Helper()
	arm := withArch(t, other, "arm64")
	inner := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: withArch(t, other, "riscv64")},
		mutate.IndexAddendum{Add: img},
	)
	return mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: other, Descriptor: v1.Descriptor{Annotations: map[string]string{"vnd.docker.reference.type": "attestation-manifest"}}},
		mutate.IndexAddendum{Add: arm, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "arm64"}}},
		mutate.IndexAddendum{Add: inner},
	)
}

func withArch(t *testing.T, img v1.Image, arch string) v1.Image {
	t.Helper()
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.Architecture = arch
	img, err = mutate.ConfigFile(img, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func dockerArchive(t *testing.T, images map[string]v1.Image) string {
	t.Helper()
	refs := map[name.Reference]v1.Image{}
	for tag, img := range images {
		ref, err := name.ParseReference(tag)
		if err != nil {
			t.Fatal(err)
		}
		refs[ref] = img
	}
	file := filepath.Join(t.TempDir(), "docker.tar")
	if err := tarball.MultiRefWriteToFile(file, refs); err != nil {
		t.Fatal(err)
	}
	return file
}

// tarOf packs a directory as GNU tar does.
func tarOf(t *testing.T, dir string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "packed.tar")
	if out, err := exec.Command("tar", "-C", dir, "-cf", file, ".").CombinedOutput(); err != nil {
		t.Fatalf("tar: %v: %s", err, out)
	}
	return file
}

func compressed(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	if _, err := z.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "packed.tar.gz")
	if err := os.WriteFile(name, out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

var quiet = registry.Logger(log.New(io.Discard, "", 0))

// newRegistry starts a registry and returns its host and what counts the
// downloads of blobs. wrap, if not nil, stands before it.
func newRegistry(t *testing.T, wrap func(http.Handler) http.Handler) (host string, blobs *atomic.Int64) {
	t.Helper()
	blobs = &atomic.Int64{}
	h := registry.New(quiet)
	counted := http.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/sha256:") {
			blobs.Add(1)
		}
		h.ServeHTTP(w, r)
	}))
	if wrap != nil {
		counted = wrap(counted)
	}
	srv := httptest.NewServer(counted)
	t.Cleanup(srv.Close)
	return strings.TrimPrefix(srv.URL, "http://"), blobs
}

func push(t *testing.T, ref string, what any, opts ...remote.Option) {
	t.Helper()
	r, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	switch what := what.(type) {
	case v1.Image:
		err = remote.Write(r, what, opts...)
	case v1.ImageIndex:
		err = remote.WriteIndex(r, what, opts...)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestImportRegistry(t *testing.T) {
	host, blobs := newRegistry(t, nil)
	img := imagetest.Image(t, richLayers(t))
	push(t, host+"/a/rich:v1", img)
	push(t, host+"/a/index:v1", nestedIndex(t, img, simpleImage(t, "o")))
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	s := openStore(t, t.TempDir())
	blobs.Store(0)
	checkRich(t, s, ImportOptions{Source: host + "/a/rich:v1"}, img)
	if n := blobs.Load(); n != 4 {
		t.Errorf("%d blobs were fetched, want a configuration and three layers", n)
	}
	for _, ref := range []string{"/a/rich:v1", "/a/rich@" + digest.String(), "/a/index:v1"} {
		blobs.Store(0)
		a, err := s.Import(t.Context(), ImportOptions{Source: host + ref}, nil)
		if err != nil || a.Digest != digest.String() {
			t.Errorf("Import %s = %v, %v", ref, a, err)
		}
		if n := blobs.Load(); n > 4 { // configurations, to tell platforms
			t.Errorf("%d blobs were fetched for %s, which is there already", n, ref)
		}
	}
}

func TestImportOnce(t *testing.T) {
	host, blobs := newRegistry(t, nil)
	push(t, host+"/rich:v1", imagetest.Image(t, richLayers(t)))
	s := openStore(t, t.TempDir())
	blobs.Store(0)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := s.Import(t.Context(), ImportOptions{Source: host + "/rich:v1"}, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := blobs.Load(); n != 8+3 {
		t.Errorf("%d blobs were fetched, want 8 configurations and 3 layers", n)
	}
}

func TestImportLogin(t *testing.T) {
	host, _ := newRegistry(t, func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if u, p, _ := r.BasicAuth(); u != "me" || p != "pass" {
				w.Header().Set("WWW-Authenticate", `Basic realm="r"`)
				http.Error(w, `{"errors":[{"code":"UNAUTHORIZED"}]}`, http.StatusUnauthorized)
				return
			}
			next.ServeHTTP(w, r)
		})
	})
	img := imagetest.Image(t, richLayers(t))
	push(t, host+"/rich:v1", img, remote.WithAuth(&authn.Basic{Username: "me", Password: "pass"}))
	s := openStore(t, t.TempDir())
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	for _, o := range []ImportOptions{{}, {Username: "me", Password: "wrong"}} {
		o.Source = host + "/rich:v1"
		_, err := s.Import(t.Context(), o, nil)
		if !fault.Is(err, fault.PermissionDenied) || !strings.Contains(err.Error(), host) {
			t.Errorf("Import with %q = %v", o.Password, err)
		}
	}
	checkRich(t, s, ImportOptions{Source: host + "/rich:v1", Username: "me", Password: "pass"}, img)

	config := fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, host, base64.StdEncoding.EncodeToString([]byte("me:pass")))
	if err := os.WriteFile(filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	checkRich(t, openStore(t, t.TempDir()), ImportOptions{Source: host + "/rich:v1"}, img)
}

func TestImportTLS(t *testing.T) {
	srv := httptest.NewUnstartedServer(registry.New(quiet))
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	t.Cleanup(srv.Close)
	host := strings.TrimPrefix(srv.URL, "https://")
	img := imagetest.Image(t, richLayers(t))
	push(t, host+"/rich:v1", img, remote.WithTransport(srv.Client().Transport))
	s := openStore(t, t.TempDir())
	_, err := s.Import(t.Context(), ImportOptions{Source: host + "/rich:v1"}, nil)
	if !fault.Is(err, fault.InvalidArgument) || fault.Of(err).Field != "ca_pem" {
		t.Errorf("Import without its authority = %v", err)
	}
	_, err = s.Import(t.Context(), ImportOptions{Source: host + "/rich:v1", CA: []byte("no pem")}, nil)
	if !fault.Is(err, fault.InvalidArgument) || fault.Of(err).Field != "ca_pem" {
		t.Errorf("Import with a broken authority = %v", err)
	}
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
	checkRich(t, s, ImportOptions{Source: host + "/rich:v1", CA: ca}, img)
}

func TestImportMirror(t *testing.T) {
	mirror, _ := newRegistry(t, nil)
	img := imagetest.Image(t, richLayers(t))
	push(t, mirror+"/hub/library/rich:v1", img)
	o := ImportOptions{Source: "rich:v1", Mirrors: map[string][]string{"docker.io": {deaf(t), mirror + "/hub"}}, Seconds: 1}
	checkRich(t, openStore(t, t.TempDir()), o, img)
}

// deaf returns a host that accepts connections and never answers.
func deaf(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String()
}

func TestImportNoAnswer(t *testing.T) {
	s := openStore(t, t.TempDir())
	host := deaf(t)
	start := time.Now()
	_, err := s.Import(t.Context(), ImportOptions{Source: host + "/rich:v1", Seconds: 1}, nil)
	if !fault.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "no answer from "+host+" within 1 s") {
		t.Errorf("Import = %v", err)
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("Import took %s", d)
	}
	_, err = s.Import(t.Context(), ImportOptions{Source: "registry.invalid/rich:v1"}, nil)
	if !fault.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "registry.invalid") {
		t.Errorf("Import from a host without an address = %v", err)
	}
}
