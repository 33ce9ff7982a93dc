package agentclient

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strconv"

	"github.com/kernflux/opendsec/internal/fault"
)

// File names a file to write.
type File struct {
	Path   string      // relative ones start at the sandbox's default directory or the user's home
	User   string      // owner, "" for the default
	Mode   fs.FileMode // permissions; 0 keeps those there are, or takes 0644
	Atomic bool        // readers see the old or the new content, never a part
}

// ReadFile reads a whole file as the user sees its path; "" is the default user.
func (c *Client) ReadFile(ctx context.Context, path, user string) ([]byte, error) {
	body, err := c.OpenFile(ctx, path, user)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	data, err := io.ReadAll(body)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, unreachable(err))
	}
	return data, nil
}

// OpenFile streams a file. The caller closes it.
func (c *Client) OpenFile(ctx context.Context, path, user string) (io.ReadCloser, error) {
	return c.get(ctx, "/files", url.Values{"path": {path}}, user)
}

// WriteFile writes a file from r, of any size, and makes the directories above it.
func (c *Client) WriteFile(ctx context.Context, f File, r io.Reader) error {
	q := url.Values{"path": {f.Path}}
	if f.Atomic {
		q.Set("atomic", "true")
	}
	if f.Mode != 0 {
		q.Set("mode", strconv.FormatUint(uint64(f.Mode.Perm()), 8))
	}
	return c.post(ctx, "/files", q, f.User, r)
}

// WriteBytes is WriteFile with the content in memory.
func (c *Client) WriteBytes(ctx context.Context, f File, data []byte) error {
	return c.WriteFile(ctx, f, bytes.NewReader(data))
}

// Pack streams a directory as tar. The caller closes it; a stream that breaks
// off ends with an error.
func (c *Client) Pack(ctx context.Context, path, user string) (io.ReadCloser, error) {
	return c.get(ctx, "/archive", url.Values{"path": {path}}, user)
}

// Unpack reads a tar stream into a directory, which is made if missing.
func (c *Client) Unpack(ctx context.Context, path, user string, r io.Reader) error {
	return c.post(ctx, "/archive", url.Values{"path": {path}}, user, r)
}

func (c *Client) get(ctx context.Context, endpoint string, q url.Values, user string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, http.MethodGet, endpoint, q, user, nil)
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

func (c *Client) post(ctx context.Context, endpoint string, q url.Values, user string, body io.Reader) error {
	resp, err := c.send(ctx, http.MethodPost, endpoint, q, user, body)
	if err != nil {
		return err
	}
	drain(resp.Body)
	return nil
}

func (c *Client) send(ctx context.Context, method, endpoint string, q url.Values, user string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, baseURL+endpoint+"?"+q.Encode(), body)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/octet-stream")
	}
	if user != "" {
		req.Header.Set(UserHeader, user)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, unreachable(err)
	}
	if resp.StatusCode >= 300 {
		defer drain(resp.Body)
		return nil, httpError(resp)
	}
	return resp, nil
}

// kinds maps the statuses of the agent's plain HTTP answers.
var kinds = map[int]fault.Kind{
	http.StatusBadRequest: fault.InvalidArgument, http.StatusUnauthorized: fault.Unauthenticated,
	http.StatusForbidden: fault.PermissionDenied, http.StatusNotFound: fault.NotFound,
	http.StatusConflict: fault.AlreadyExists, http.StatusServiceUnavailable: fault.Unavailable,
	http.StatusInsufficientStorage: fault.QuotaExceeded, http.StatusRequestTimeout: fault.Timeout,
}

// httpError reads the agent's JSON error.
func httpError(resp *http.Response) error {
	var body struct {
		Message string `json:"message"`
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil || json.Unmarshal(data, &body) != nil || body.Message == "" {
		body.Message = "the agent answered " + resp.Status
	}
	kind, known := kinds[resp.StatusCode]
	if !known {
		kind = fault.Internal
	}
	return fault.New(kind, "%s", body.Message)
}
