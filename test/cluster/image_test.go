package cluster

import (
	nethttp "net/http"
	"os"
	"path/filepath"

	"connectrpc.com/connect"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
	"github.com/kernflux/opendsec/internal/image/imagetest"
	"github.com/kernflux/opendsec/internal/testenv"
)

// http adds the caller's token to each request.
type http struct {
	env    map[string]string
	client *nethttp.Client
}

func (h *http) Do(r *nethttp.Request) (*nethttp.Response, error) {
	r.Header.Set("Authorization", "Bearer "+h.env["OPENDSEC_TOKEN"])
	return h.client.Do(r)
}

// importImage brings a small image, busybox alone, in as root/small.
func (c *cluster) importImage() {
	c.t.Helper()
	busybox, err := os.ReadFile(testenv.Program(c.t, "busybox", "busybox-static"))
	if err != nil {
		c.t.Fatal(err)
	}
	program := imagetest.File("bin/busybox", string(busybox))
	program.Mode = 0o755
	entries := []imagetest.Entry{imagetest.Dir("bin"), imagetest.Dir("srv"), imagetest.Dir("etc"),
		imagetest.File("etc/passwd", "root:x:0:0:root:/:/bin/sh\napp:x:1000:1000::/srv:/bin/sh\n"),
		imagetest.File("etc/group", "root:x:0:\napp:x:1000:\n"), program}
	for _, applet := range []string{"sh", "cat", "echo", "sleep", "true"} {
		entries = append(entries, imagetest.Symlink("bin/"+applet, "busybox"))
	}
	tag, err := name.NewTag("small:latest")
	if err != nil {
		c.t.Fatal(err)
	}
	archive := filepath.Join(c.in.StateDir(), "small.tar")
	if err := tarball.WriteToFile(archive, tag, imagetest.Image(c.t, [][]byte{imagetest.Tar(c.t, entries...)})); err != nil {
		c.t.Fatal(err)
	}
	images := opendsecv1connect.NewImageServiceClient(c.http, c.http.env["OPENDSEC_ADDR"])
	stream, err := images.ImportImage(c.ctx, connect.NewRequest(&opendsecv1.ImportImageRequest{Source: "docker-archive:" + archive, Name: "root/small"}))
	if err != nil {
		c.t.Fatal(err)
	}
	defer stream.Close()
	for stream.Receive() {
		if stream.Msg().GetImage() != nil {
			return
		}
	}
	c.t.Fatalf("import: %v", stream.Err())
}
